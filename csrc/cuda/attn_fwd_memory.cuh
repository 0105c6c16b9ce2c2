/* Shared memory of attn_fwd_sm90.cu: the rings of Q, K and V, their barriers, and what else the producer tells the
 * warpgroups. */
#ifndef FA_ATTN_FWD_MEMORY_CUH
#define FA_ATTN_FWD_MEMORY_CUH

#include "attn_fwd_tiles.cuh"

/* Operands are stored as TMA writes them and wgmma reads them: chunks of CHUNK columns, rows of ROW_BYTES, the 16-byte
 * pieces of a row swizzled by the row's number. Each chunk starts at a multiple of 1024 bytes, the swizzle's period. */
struct shared_memory {
    alignas(1024) u16 q[Q_STAGES][BLOCK_Q * HEAD_DIM];
    alignas(1024) u16 k[STAGES][BLOCK_KV * HEAD_DIM];
    alignas(1024) u16 v[V_STAGES][BLOCK_KV * HEAD_DIM];
    alignas(1024) u16 o[O_BY_TMA && !O_IN_Q ? BLOCK_Q * HEAD_DIM : 8]; /* per warp: chunks of 16 rows */
    /* Arrivals. full: one, with TMA's bytes. empty: one for each consumer warp. all_done: one for each consumer warp,
     * when it is told to REPORT. */
    u64 q_full[Q_STAGES], q_empty[Q_STAGES];
    u64 k_full[STAGES], k_empty[STAGES];
    u64 v_full[V_STAGES], v_empty[V_STAGES];
    u64 all_done;
    u64 tile_wanted, tile_found; /* between producer and finder: one arrival each */
    tile tiles[TILES];
    window packed;    /* the finder's */
    u64 seed, offset; /* of dropout */
    /* Tiles that failed, as each consumer warp found them; how many of them the finder has seen. */
    struct {
        int tile, rows; /* its number in the launch, which 16 of its rows */
    } failed[4 * WGS][FAILED];
    int num_failed[4 * WGS], num_seen[4 * WGS];
};
static_assert(sizeof(shared_memory) <= FA_SHARED_BYTES_OF(CTAS), "an SM has 227 KiB for one CTA, 113 for each of two");

/* Position in a ring: the parity flips each time round. */
template <int SIZE> struct ring {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++stage == SIZE) stage = 0, parity ^= 1;
    }
};

/* Named barriers: the turn of each warpgroup to issue products; the four warps of each. */
enum { BAR_TURN = 1, BAR_GROUP = BAR_TURN + WGS };

#endif
