/* Shared memory of attn_fwd_sm90.cu: the pipeline stages of Q, K and V, their mbarriers, and the slots of work
 * tiles. */
#ifndef FA_ATTN_FWD_MEMORY_CUH
#define FA_ATTN_FWD_MEMORY_CUH

#include "attn_fwd_tiles.cuh"

/* V of 16 bits is an operand as TMA brings it. V of 8 bits comes to a place of its own first, and transposer warps make
 * the operand (attn_fwd_fp8_values.cuh). */
template <int ELEMENT_BYTES, int LOAD_STAGES> struct loaded_values {};
template <int LOAD_STAGES> struct loaded_values<1, LOAD_STAGES> {
    alignas(1024) element raw_v[LOAD_STAGES][BLOCK_KV * STORED_V];
    u64 raw_full[LOAD_STAGES], raw_empty[LOAD_STAGES]; /* TMA completes the first; transposer warps arrive at empty. */
    int is_end[LOAD_STAGES];                           /* Instead of V, this stage brings the end of the launch. */
};

/* Where the keys of a key tile lie, of K and of V. Two warps copy single keys of each, and every warp writes the places
 * that it copies from. */
template <bool HAS_PLACES> struct places_of_keys {
    static constexpr u32 *places[2] = {nullptr, nullptr};
};
template <> struct places_of_keys<true> {
    alignas(16) u32 places[2][BLOCK_KV];
};

/* TMA writes operands and wgmma reads them in the same layout. A matrix consists of chunks of CHUNK columns, whose
 * rows have ROW_BYTES. The 16-byte vectors of a row are swizzled by the row's number. Each chunk starts at a
 * multiple of 1024 bytes, the swizzle's period. */
struct shared_without_pairs : loaded_values<element::BYTES, V_LOAD_STAGES>,
                              stage_entries<LISTED_STAGES>,
                              places_of_keys<SINGLE_KEYS> {
    alignas(1024) element q[Q_STAGES][BLOCK_Q * STORED_QK];
    alignas(1024) element k[STAGES][BLOCK_KV * STORED_QK];
    alignas(1024) element v[V_STAGES][BLOCK_KV * STORED_V];
    /* Each warp has chunks of 16 rows. */
    alignas(1024) element::output o[O_ELEMENTS];
    /* The producer arrives at full, once, and TMA's bytes complete it. Each consumer warp arrives at empty. In 8 bits
     * each transposer warp arrives at v_full. Lanes that copy single keys arrive at full, each for its copies. */
    u64 q_full[Q_STAGES], q_empty[Q_STAGES];
    u64 k_full[STAGES], k_empty[STAGES];
    u64 v_full[V_STAGES], v_empty[V_STAGES];
    u64 all_done;                /* Each consumer warp arrives when it is told to REPORT. The producer waits. */
    u64 tile_wanted, tile_found; /* The producer arrives at the first, the scheduler at the second. The other waits. */
    tile tiles[TILE_SLOTS];
    sequence_set sequences; /* The scheduler keeps them from one work tile to the next. */
    u64 seed, offset;       /* of dropout */
    /* Each consumer warp notes its row strips that failed. num_seen counts the notes that the scheduler has read. */
    struct {
        int tile_idx, strip; /* the work tile's number in the launch; the row strip in the tile */
    } failed[4 * WGS][FAILED];
    int num_failed[4 * WGS], num_seen[4 * WGS];
    /* With a cache: the producer gives each work tile to the other warps that load, which arrive at `read`. The
     * scheduler is not among them, because it knows the work tile. */
    u64 given[CACHE ? Q_STAGES : 1], read[CACHE ? Q_STAGES : 1];
};

/* What a score_mod reads of each pair (attn_fwd_pairs.cuh), for the 16 rows of a warp and the keys of a step. The warp
 * has a place of its own for it, if shared memory has the room. Otherwise the place of the warp's O may be large
 * enough. */
struct shared_with_pairs : shared_without_pairs {
    alignas(256) unsigned short pairs[4 * WGS][16 * BLOCK_KV];
};
constexpr bool MAY_HOLD_PAIRS = READS_OCTETS && BLOCK_KV % 32 == 0;
constexpr bool PAIRS_ALONE = MAY_HOLD_PAIRS && sizeof(shared_with_pairs) <= FA_SHARED_BYTES_OF(CTAS);
constexpr bool PAIRS_IN_O = MAY_HOLD_PAIRS && !PAIRS_ALONE && O_ELEMENTS >= BLOCK_Q * BLOCK_KV;
constexpr bool HOLDS_PAIRS = PAIRS_ALONE || PAIRS_IN_O;
template <bool> struct shared_memory_of : shared_without_pairs {
    static constexpr unsigned short *pairs[4 * WGS] = {};
};
template <> struct shared_memory_of<true> : shared_with_pairs {};
struct shared_memory : shared_memory_of<PAIRS_ALONE> {};
static_assert(sizeof(shared_memory) <= FA_SHARED_BYTES_OF(CTAS), "an SM has 227 KiB for one CTA, 113 for each of two");

/* One thread. Consumers wait for parity 0 of full first. The producer waits for parity 1 of empty first, which
 * passes at once because all stages are free. */
DEVICE void init_barriers(shared_memory &smem) {
    const u32 consumers = of_warps(4 * WGS);
    for (int i = 0; i < Q_STAGES; i++) mbarrier_init(&smem.q_full[i], 1), mbarrier_init(&smem.q_empty[i], consumers);
    for (int i = 0; i < STAGES; i++)
        mbarrier_init(&smem.k_full[i], K_ARRIVALS), mbarrier_init(&smem.k_empty[i], consumers);
    for (int i = 0; i < V_STAGES; i++)
        mbarrier_init(&smem.v_full[i], V_ARRIVALS), mbarrier_init(&smem.v_empty[i], consumers);
    mbarrier_init(&smem.all_done, consumers);
    mbarrier_init(&smem.tile_wanted, 1), mbarrier_init(&smem.tile_found, 1);
    for (int i = 0; CACHE && i < Q_STAGES; i++)
        mbarrier_init(&smem.given[i], 1), mbarrier_init(&smem.read[i], of_warps(SINGLE_KEYS ? 2 : 1));
}

/* One thread. No row strip has failed, and no set of packed sequences is known. */
DEVICE void init_notes(shared_memory &smem) {
    for (int i = 0; i < 4 * WGS; i++) smem.num_failed[i] = smem.num_seen[i] = 0;
    if (FLEX && CLOSES_EARLY) set_no_tile(smem.tiles[TILE_SLOTS - 1], COMPUTE); /* of which rows are closed first */
    smem.sequences.first = -32, smem.sequences.begin = smem.sequences.end = 0;
}

/* A position in a pipeline of SIZE stages. The parity flips whenever the position wraps around. */
template <int SIZE> struct ring {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++stage == SIZE) stage = 0, parity ^= 1;
    }
};

/* Named barriers: each warpgroup has one for its turn, and one where its four warps meet. */
enum { BAR_TURN = 1, BAR_GROUP = BAR_TURN + WGS };

#endif
