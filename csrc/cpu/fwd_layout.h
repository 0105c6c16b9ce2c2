/* The memory layout of the forward. plan/cpu_fwd.c counts the bytes, and attn_fwd.h fills them. Every array is aligned
 * to 64 bytes.
 *
 *   workspace   tasks | one scratch for each worker | flex: kinds of the blocks
 *   scratch     Q^T, O^T of all tiles of a task | K rows, V^T, S^T of one block of keys | addresses of the
 *               rows of K and V of two blocks, and of the rows to prefetch | tiles */
#ifndef FA_CPU_FWD_LAYOUT_H
#define FA_CPU_FWD_LAYOUT_H

#include "fetch.h"
#include "flex/block_map.h"
#include "partition.h"

#define FA_MAX_BLOCK_Q  64
#define FA_MAX_BLOCK_KV 128

/* One tile: the row and head of each lane, and the running state of the online softmax. Keys count from key 0 of the
 * sequence. */
typedef struct {
    float row_max[FA_MAX_BLOCK_Q], row_sum[FA_MAX_BLOCK_Q];
    union {
        float slope[FA_MAX_BLOCK_Q];
        float max_score[FA_MAX_BLOCK_Q]; /* flex: the largest score so far, in natural units */
    };
    int64_t first[FA_MAX_BLOCK_Q], end[FA_MAX_BLOCK_Q], diagonal[FA_MAX_BLOCK_Q]; /* keys of a lane's row */
    int64_t row[FA_MAX_BLOCK_Q], head[FA_MAX_BLOCK_Q];
    int64_t first_key, end_key;       /* some lane sees these keys */
    int64_t common_first, common_end; /* every lane sees these keys; empty when some lane sees no key */
    bool is_started;                  /* O^T holds a sum */
    int lanes, valid_lanes; /* lanes is a multiple of the vector; lanes past valid_lanes repeat the last valid lane */
} fa_fwd_tile;

typedef struct {
    int64_t words;    /* words of a packed row of Q or K, padded with zeros; with qv the words of qv or V are behind */
    int64_t k_words;  /* words of Q or K that hold elements. Words of qv or V begin here. */
    int64_t qk_words; /* words that the scores sum over: k_words, and the words of qv */
    int64_t columns;  /* d_v padded to whole transposes, the number of rows of V^T and O^T */
    int64_t v_stride; /* words of a row of V^T */
    int block_q, block_kv, tiles;
    size_t q_t, o_t, k, v_t, scores, bytes, hidden, bias, key_rows, pieces, tile; /* offsets in a scratch */
    size_t scratch_bytes;
} fa_fwd_layout;

static inline size_t fa_take(size_t *at, int64_t bytes) {
    size_t offset = *at;
    *at += ((size_t)bytes + 63) / 64 * 64;
    return offset;
}

/* The keys of a block of the forward. Small blocks waste less on the diagonal of a short sequence. From 96 to 768 keys
 * the speed varies by at most 3%. Where blocks end decides about bits. So the sequence's own length decides, not the
 * longest of the batch. Blocks of flex lie alike in all sequences, so there len_kv is that of the problem. */
static inline int fa_fwd_block_kv(const fa_problem *p, int64_t len_kv) {
    const bool is_short_causal = p->window_right >= 0 && len_kv <= 1024;
    const bool has_small_blocks = p->flex && p->flex->block_q > 0 && p->flex->block_kv <= 64;
    int block_kv = p->d > 128 || p->d_v > 128 || is_short_causal || has_small_blocks ? 64 : FA_MAX_BLOCK_KV;
    /* A sequence of one block has the same bits whatever the block's size. */
    while (block_kv > 32 && len_kv <= block_kv / 2) block_kv /= 2;
    return block_kv;
}

/* block_kv is the largest block of a sequence. score_buffers is the number of buffers for S^T and P. Each buffer holds
 * one tile on one block of keys. */
static inline fa_fwd_layout fa_fwd_layout_of(const fa_problem *p, int word_elems, int block_q, int block_kv, int tiles,
                                             int score_buffers) {
    const int64_t k_words = (p->d + word_elems - 1) / word_elems, columns = (p->d_v + 15) / 16 * 16;
    const int64_t qv_words = p->qv.data ? (p->d_v + word_elems - 1) / word_elems : 0;
    const int64_t words = (k_words + 15) / 16 * 16 + (qv_words + 15) / 16 * 16, widest = p->d > p->d_v ? p->d : p->d_v;
    fa_fwd_layout l = {.words = words,
                       .k_words = k_words,
                       .qk_words = k_words + qv_words,
                       .columns = columns,
                       .v_stride = block_kv / word_elems,
                       .block_q = block_q,
                       .block_kv = block_kv,
                       .tiles = tiles};
    size_t at = 0;
    l.q_t = fa_take(&at, tiles * words * block_q * 4);
    l.o_t = fa_take(&at, tiles * columns * block_q * 4);
    l.k = fa_take(&at, block_kv * words * 4);
    l.v_t = fa_take(&at, columns * l.v_stride * 4);
    l.scores = fa_take(&at, (int64_t)score_buffers * block_kv * block_q * 4);
    l.bytes = fa_take(&at, p->dropout_p > 0 ? (int64_t)block_kv * block_q : 0);
    l.hidden = fa_take(&at, fa_flex_of(p) ? (int64_t)block_kv * block_q : 0);
    l.bias = fa_take(&at, p->bias.data ? (int64_t)block_kv * block_q * 4 : 0);
    l.key_rows = fa_take(&at, 4 * block_kv * (int64_t)sizeof(void *));
    l.pieces = fa_take(&at, 2 * (block_kv + block_q) * fetch_pieces(widest * 4) * (int64_t)sizeof(void *));
    l.tile = fa_take(&at, tiles * (int64_t)sizeof(fa_fwd_tile));
    l.scratch_bytes = at;
    return l;
}

/* The bytes of the kinds of blocks that end the workspace. */
static inline size_t fa_flex_kinds_bytes(const fa_problem *p) {
    if (!fa_flex_of(p)) return 0;
    const fa_flex_block_map map = fa_flex_block_map_of(p);
    return fa_flex_block_map_bytes(&map);
}

/* The bytes of the tasks, which lie in front of the first scratch. */
static inline size_t fa_tasks_bytes(int64_t num_tasks) {
    size_t at = 0;
    fa_take(&at, num_tasks * (int64_t)sizeof(fa_task));
    return at;
}

#endif
