/* Where TMA reads: the boxes that attn_fwd_sm90 and both backward kernels ask for, over random packed problems. Each must
 * begin inside its map (csrc/cuda/tensor_map.h says what happens otherwise) and in the rows of its own sequence. The kernel's
 * own code chooses the tiles, and in the backward brings them, on the emulated warp of cuda_emulation.h; of the forward the
 * boxes of a tile are named here as produce() in attn_fwd_producer.cuh does.
 *
 * tests/guards/test_check_kernels.py compiles it for each row of tiles.def, BACKWARD or not. */
#define FA_PTX_SM90_CUH
#include "cuda/tensor_map.h"

/* ---- in place of ptx_sm90.cuh ------------------------------------------------------------------------------------ */

/* What a test map's words say; tensors are [row, head, column]. */
enum { COLUMNS_OF, ROWS_OF, HEADS_OF, OFFSETS, USED };
static long num_boxes;

static void check_box(const fa_tensor_map *map, int column, int row, int head, int end) {
    const unsigned long long *w = map->words;
    const int *offsets = (const int *)w[OFFSETS], *used = (const int *)w[USED], rows = (int)w[ROWS_OF];
    bool is_there = false;
    for (int i = 0; offsets[i] < rows; i++) { /* row i of the sequence that ends before row e: (rows - len + i, e) */
        const int len = used ? min(used[i], offsets[i + 1] - offsets[i]) : offsets[i + 1] - offsets[i];
        if (offsets[i] + len == end && row >= rows - len && row < rows) is_there = true;
    }
    num_boxes++;
    if (is_there && column >= 0 && (unsigned long long)column < w[COLUMNS_OF] && head >= 0 &&
        (unsigned long long)head < w[HEADS_OF])
        return;
    fprintf(stderr, "a box begins outside: column %d, row %d of %d, head %d, sequence that ends at %d\n", column, row,
            rows, head, end);
    abort();
}

enum : u64 { L2_EVICT_FIRST, L2_EVICT_LAST };
static void cp_async_bulk_tensor_load(void *, const fa_tensor_map *map, u64 *, int column, int row, int head, int end,
                                      u64) {
    check_box(map, column, row, head, end);
}
static void cp_async_bulk_tensor_multicast(void *, const fa_tensor_map *map, u64 *, int column, int row, int head,
                                           int end, int, u64) {
    check_box(map, column, row, head, end);
}
static void cp_async_bulk_prefetch_tensor(const fa_tensor_map *map, int column, int row, int head, int end) {
    check_box(map, column, row, head, end);
}

/* The producer waits for nobody. */
#define mbarrier_wait(...)             ((void)0)
#define mbarrier_arrive(...)           ((void)0)
#define mbarrier_arrive_expect_tx(...) ((void)0)
#define arrives_for_warp(lane)         ((lane) == 0)
#define st_async(...)                  ((void)0)
#define mbarrier_arrive_remote(...)    ((void)s.idx++) /* take_tile in CTA 1: CTA 0 has sent the next one */
#define fence_proxy_async_global()     ((void)0)

/* ---- the kernels' tiles -------------------------------------------------------------------------------------------- */

#ifdef BACKWARD

static const float *first_stat, *last_stat;
static void cp_async_bulk_load(void *, const void *src, u32 bytes, u64 *) {
    const char *begin = (const char *)src;
    if (begin >= (const char *)first_stat && begin + bytes <= (const char *)last_stat) return;
    fprintf(stderr, "statistics from outside\n");
    abort();
}
static unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
static int atomicAdd(unsigned *counter, int x) { return (int)(*counter += (unsigned)x) - x; }

#include "cuda/attn_bwd_tiles.cuh"

struct shared_memory {
    u16 k[1], k_other[1], v[KEYS * COLUMNS], q[2][BLOCK_Q * COLUMNS], dout[2][BLOCK_Q * COLUMNS];
    float lse[2][BLOCK_Q], d[2][BLOCK_Q];
    u64 k_full, k_empty, v_full, v_empty, q_full[2], q_empty[2], do_full[2], do_empty[2], tile_full[2], tile_empty[2];
    u64 idx_full, idx_empty;
    int idx;
    tile tiles[2];
};
static shared_memory s;

static void kernel(const params &p) {
    s.idx = 0;
    __syncwarp();
    produce(p, s);
}
constexpr int NUM_CTAS = CTAS;

/* A step's place is what dividing gives. */
static void check_places(unsigned (*below)(unsigned)) {
    for (int heads = 1; heads <= 256; heads++) {
        params p = {};
        p.heads_per_tile = heads, p.heads_inverse = FA_HEADS_INVERSE(heads);
        for (int n = 0; n < 2000; n++) {
            const int step = n < 3 * heads ? n : (int)below(0x7fffffffu / (unsigned)heads),
                      q_end = step / heads + 1 + n;
            const step_place at = place_of_step(p, q_end, step);
            if (at.q_tile != q_end - 1 - step / heads || at.head_in_group != step % heads) abort();
        }
    }
}

#else

#include "cuda/attn_fwd_params.h"
typedef fa_attn_fwd_params params;
constexpr int BLOCK_Q = 64 * WGS, NUM_CTAS = 1;
constexpr bool LONGEST_FIRST = CAUSAL || LOCAL;
#include "cuda/attn_fwd_tiles.cuh"

static window w;
static tile t;

static void kernel(const params &p) {
    const int num_tiles = count_packed_tiles(p) * p.h;
    w.first = -32, w.begin = w.end = 0;
    __syncwarp();
    for (int n = 0; n < num_tiles + 5; n++) {
        const int idx = n < num_tiles ? n : n * 7 % (num_tiles ? num_tiles : 1); /* some once more */
        if (num_tiles == 0) break;
        find_tile(p, w, idx, t);
        __syncwarp();
        if (threadIdx.x == 0) {
            if (t.row >= t.len_q) abort();
            for (int column = 0; column < p.d; column += HEAD_DIM % 64 ? 32 : 64) {
                check_box(&p.q, column, t.row_0 + t.row, t.head, t.batch);
                for (int j = t.kv_begin; j < t.kv_end; j++) {
                    check_box(&p.k, column, t.kv_row_0 + j * BLOCK_KV, t.kv_head, t.kv_batch);
                    if (j * BLOCK_KV >= t.len_kv) abort();
                }
            }
        }
        __syncwarp();
    }
}

#endif

/* ---- problems ------------------------------------------------------------------------------------------------------ */

extern "C" {
typedef struct {
    unsigned grid_x, grid_y, grid_z, cluster, block, shared_bytes;
} emulated_shape;
void emulate_launch(void (*kernel)(const void *), const void *parameter, const emulated_shape *shape);
}

static unsigned below(unsigned n) {
    static u64 state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % n;
}

/* Lengths of all kinds, 0 and 1 and those around tiles among them. */
static int make_offsets(int *offsets, int b) {
    const int tiles[] = {64, 128, BLOCK_Q, BLOCK_KV};
    offsets[0] = 0;
    for (int i = 0; i < b; i++) {
        const int around = (int)(below(3) + 1) * tiles[below(4)] + (int)below(5) - 2;
        offsets[i + 1] = offsets[i] + (below(2) ? around : below(2) ? (int)below(3) : (int)below(700));
    }
    offsets[b + 1] = 0x7fffffff;
    return offsets[b];
}

static fa_tensor_map map_of(int d, int rows, int heads, const int *offsets) {
    fa_tensor_map map = {};
    map.words[COLUMNS_OF] = (u64)d, map.words[ROWS_OF] = (u64)rows, map.words[HEADS_OF] = (u64)heads;
    map.words[OFFSETS] = (u64)offsets;
    return map;
}

static void run(const void *p) { kernel(*(const params *)p); }

int main() {
    static int offsets_q[100], offsets_kv[100], used[100];
    const emulated_shape shape = {NUM_CTAS, 1, 1, 1, 32, 0};
#ifdef BACKWARD
    check_places(below);
#endif
    for (int n = 0; n < 60; n++) {
        params p = {};
        unsigned counter = 0;
        const int heads = 1 + (int)below(3);
        p.b = 1 + (int)below(n % 2 ? 70 : 6);
        const int h_kv = 1 + (int)below(3), total_q = make_offsets(offsets_q, p.b);
        const int total_kv = make_offsets(offsets_kv, p.b);
        p.h = h_kv * heads, p.d = HEAD_DIM - 8 * (int)below(HEAD_DIM > 64 ? 4 : HEAD_DIM / 8);
        p.len_q = total_q, p.len_kv = total_kv;
        p.cu_seqlens_q = offsets_q, p.cu_seqlens_k = offsets_kv;
        p.window_left = LOCAL && below(3) ? (int)below(300) : -1;
        p.window_right = CAUSAL ? 0 : LOCAL && below(3) ? (int)below(300) : -1;
        p.group_heads = 1 + (int)below(4);
        p.q = map_of(p.d, total_q, p.h, offsets_q);
        p.k = p.v = map_of(p.d, total_kv, h_kv, offsets_kv);
#ifdef BACKWARD
        p.heads_per_tile = heads, p.h_kv = h_kv, p.pieces = CUTS_HEADS ? 1 + (int)below(3) : 1;
        p.h *= p.pieces, p.q = p.dout = map_of(p.d, total_q, p.h, offsets_q);
        p.group_heads = p.group_heads < h_kv * p.pieces ? p.group_heads : h_kv * p.pieces;
        p.num_slabs = total_q / BLOCK_Q + p.b;
        static float stats[1]; /* an address: nothing is read */
        first_stat = p.stats = stats, last_stat = stats + (long)p.num_slabs * p.h * 2 * BLOCK_Q;
        p.tile_counter = &counter;
#else
        p.heads_per_kv = heads;
        p.group_heads = p.group_heads < p.h ? p.group_heads : p.h;
        for (int i = 0; i < p.b; i++) used[i] = (int)below(800);
        if (below(2)) p.seqused_k = used, p.k.words[USED] = p.v.words[USED] = (u64)used;
#endif
        emulate_launch(run, &p, &shape);
    }
    printf("%ld boxes begin inside their maps\n", num_boxes);
    return num_boxes < 1000;
}
