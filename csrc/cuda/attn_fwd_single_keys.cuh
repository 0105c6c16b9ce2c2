/* Keys of a cache one by one, in attn_fwd_sm90.cu. TMA's swizzle repeats after 8 rows, so TMA cannot load fewer. Where
 * pages hold no multiple of 8 keys, warps copy rows by cp.async, 16 bytes a lane, and swizzle them themselves.
 *
 * ROW_LANES neighbouring lanes have one row of a chunk. A lane looks up the place of one key in 32, and hands it to the
 * lanes that copy this key through shared memory. A warp that copies shares a quarter of its SM with consumer warps. So
 * an instruction takes 7 to 12 clocks, and each one counts. Most of all those of K do, whose stage becomes free while
 * the consumers compute exponentials. So the producer and another warp copy half of K each. A third warp copies most of
 * V. V is needed one step after K, so the scheduler warp copies the rest of V while no work tile is wanted. */
#ifndef FA_ATTN_FWD_SINGLE_KEYS_CUH
#define FA_ATTN_FWD_SINGLE_KEYS_CUH

#include "attn_fwd_memory.cuh"
#include "division.cuh"

/* A copy is one instruction of a warp for each chunk. A batch knows all its addresses before its first copy. So no copy
 * waits for the one before. */
constexpr int ROW_LANES = ROW_BYTES / 16, ROWS_AT_ONCE = 32 / ROW_LANES;
constexpr int COPIES = BLOCK_KV / ROWS_AT_ONCE, BATCH = 4, BATCHES = COPIES / BATCH;
/* The copies of each warp, in whole batches. The scheduler warp has REST_OF_V. It finds work tiles, too, so it has at
 * most three eighths of V, but at least one batch. */
constexpr int REST_OF_K_COPIES = BATCHES / 2 * BATCH, OF_K_COPIES = COPIES - REST_OF_K_COPIES;
constexpr int REST_OF_V_COPIES = (BATCHES > 2 ? BATCHES * 3 / 8 : 1) * BATCH, OF_V_COPIES = COPIES - REST_OF_V_COPIES;
static_assert(!SINGLE_KEYS || (COPIES % BATCH == 0 && BATCHES >= 2), "each warp copies something of K or V");

/* Copies [BEGIN, END) of each key tile of K or V, which has COLUMNS columns in CHUNKS chunks. This lane knows the keys
 * lane, lane + 32 and so on. */
template <int BEGIN, int END, int CHUNKS, int COLUMNS> struct single_keys {
    static constexpr u32 NOWHERE = 0xffffffffu; /* the place of a key that is not in use */
    static constexpr int FIRST = BEGIN / ROW_LANES, PLACES = (END - 1) / ROW_LANES - FIRST + 1;

    const int *table = nullptr; /* of the sequence */
    const char *src = nullptr;  /* the lane's piece of a row at place 0 */
    int first = 0, len_kv = 0;  /* the row of this lane's first key of the sequence; the sequence's keys */
    int key_tile = 0;           /* the next one */
    u32 pages[PLACES];          /* of its keys, as the block table has them */

    template <class tile>
    DEVICE void begin(const params &p, const fa_attn_fwd_rows &from, const tile &t, int key_tile) {
        table = p.cache.block_table + t.kv_batch * p.cache.table_stride;
        src = (const char *)from.data + (t.kv_head * from.stride_h + threadIdx.x % ROW_LANES) * 16;
        first = t.kv_origin + 32 * FIRST + threadIdx.x % 32, len_kv = t.len_kv;
        ask(p, key_tile);
    }
    /* All copies of 32 keys are the warp's own. */
    DEVICE static constexpr bool owns_all(int i) {
        return (FIRST + i) * ROW_LANES >= BEGIN && (FIRST + i + 1) * ROW_LANES <= END;
    }
    DEVICE int row_of(int i) const { return first + key_tile * BLOCK_KV + 32 * i; }
    DEVICE bool is_used(int i) const {
        const int in_tile = 32 * (FIRST + i) + threadIdx.x % 32;
        return in_tile < BLOCK_KV && key_tile * BLOCK_KV + in_tile < len_kv;
    }
    DEVICE void ask(const params &p, int next) {
        key_tile = next;
        if (next < 0) return;
#pragma unroll
        for (int i = 0; i < PLACES; i++) pages[i] = is_used(i) ? table[divide(row_of(i), p.cache.by_page_size)] : 0;
    }
    /* Where a key lies in a head, in pieces of 16 bytes. A page number that no page has counts as the last page's. */
    DEVICE u32 place_of(const params &p, const fa_attn_fwd_rows &from, int i) const {
        const u32 in_page = row_of(i) - divide(row_of(i), p.cache.by_page_size) * p.cache.page_size;
        return min(pages[i], (u32)p.cache.num_pages - 1) * from.stride_page + in_page * from.stride_row;
    }

    /* Copy number j of the key tile, from `at`. `pieces` are left in the row from the lane's first one on. */
    DEVICE void copy(const u32 (&dst)[2], int j, const char *at, int pieces) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            if ((c + 1) * CHUNK <= COLUMNS || c * CHUNK + 8 * ((int)threadIdx.x % ROW_LANES) < COLUMNS)
                cp_async_16(dst[j % 2] + (c * BLOCK_KV + j * ROWS_AT_ONCE) * ROW_BYTES, at + c * ROW_BYTES,
                            c * ROW_LANES < pieces);
    }
    /* Copies the keys of the next key tile, and asks for the pages of the one after. They come while this one is
     * copied. Keys that are not in use become zeros, and so do columns that the cache lacks. Whole warp. */
    DEVICE void load(const params &p, const fa_attn_fwd_rows &from, u32 *places, element *stage, u64 *full, int next) {
        const int lane = threadIdx.x % 32, piece = lane % ROW_LANES, row = lane / ROW_LANES;
        const bool has_all = (key_tile + 1) * BLOCK_KV <= len_kv && from.columns == COLUMNS;
        __syncwarp(); /* All lanes have read the places of the last key tile. */
#pragma unroll
        for (int i = 0; i < PLACES; i++) {
            const int key = 32 * (FIRST + i) + lane, j = key / ROWS_AT_ONCE;
            if (owns_all(i) || (BEGIN <= j && j < END)) /* The warp with the other copies may be at another key tile. */
                places[key % ROWS_AT_ONCE * COPIES + j] = has_all || is_used(i) ? place_of(p, from, i) : NOWHERE;
        }
        __syncwarp();
        ask(p, next);
        const u32 to =
            smem_address(stage) + row * ROW_BYTES + (piece ^ (ROW_BYTES == 128 ? row : row / 2) % ROW_LANES) * 16;
        /* Every second copy begins amid the swizzle's 8 rows of 128 bytes. */
        const u32 dst[2] = {to, to ^ (ROW_BYTES == 128 ? 64 : 0)};
        const uint4 *my_places = (const uint4 *)(places + row * COPIES);
        if (has_all) {
#pragma unroll
            for (int j = BEGIN; j < END; j += BATCH) {
                const uint4 x = my_places[j / 4];
                const char *at[BATCH] = {src + (u64)x.x * 16, src + (u64)x.y * 16, src + (u64)x.z * 16,
                                         src + (u64)x.w * 16};
#pragma unroll
                for (int k = 0; k < BATCH; k++) pin(at[k]);
#pragma unroll
                for (int k = 0; k < BATCH; k++) copy(dst, j + k, at[k], COLUMNS / 8);
            }
        } else {
#pragma unroll 2
            for (int j = BEGIN; j < END; j++) {
                const u32 place = places[row * COPIES + j];
                copy(dst, j, src + (u64)(place == NOWHERE ? 0 : place) * 16,
                     place == NOWHERE ? 0 : from.columns / 8 - piece);
            }
        }
        cp_async_mbarrier_arrive(full);
    }
};

#endif
