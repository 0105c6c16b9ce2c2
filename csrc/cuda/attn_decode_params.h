/* The host hands these parameters to the decode kernel. C code fills the struct, and CUDA code reads the struct. All
 * types have the same layout on both sides. */
#ifndef FA_ATTN_DECODE_PARAMS_H
#define FA_ATTN_DECODE_PARAMS_H

#include "division.h"
#include "sinks_params.h"

#define FA_DECODE_MAX_CTAS      288  /* CTAs of one launch */
#define FA_DECODE_COUNTER_SLOTS 2048 /* slots of one kernel, 2.4 MB, which gpu/slots.c gives out */

#define FA_DECODE_MAX_CLUSTER   8  /* CTAs of a cluster */
#define FA_DECODE_CLUSTER_BATCH 32 /* sequences of a launch with clusters, one per lane of a warp */

/* This kernel appends at most so many new keys to a sequence. kvcache.cu appends more keys. */
#define FA_DECODE_MAX_NEW 8

/* A row of a part has so many floats. The row holds O before the division by the row sum, m in exponents of 2, l,
 * and 2 unused floats. */
#define FA_DECODE_PART_ROW(d) ((d) + 4)

/* One warp loads so many keys of one slot. A warp loads fewer keys where the scores of 64 rows leave no registers. */
#define FA_DECODE_WARP_KEYS(d, warps_q) ((warps_q) == 4 && (d) > 128 ? 8 : 16)

/* A page number waits behind the keys that are on their way, longer than a short step takes. With short steps a warp
 * has the page numbers of FA_DECODE_PAGE_STEPS steps in shared memory, or on their way there. */
#define FA_DECODE_PAGES_AHEAD(d) ((d) <= 64)
#define FA_DECODE_PAGE_STEPS     4

/* The shared memory of one CTA holds the rings, the queries, page numbers and a few words. Between pieces the results
 * lie in place of the rings. */
#define FA_DECODE_MAX(x, y) ((x) > (y) ? (x) : (y))
#define FA_DECODE_SHARED_BYTES(d, warps_q, teams, slots)                                                              \
    ((FA_DECODE_MAX(2 * (slots) * FA_DECODE_WARP_KEYS(d, warps_q) * (d), 16 * (4 * (d) + 40)) * (warps_q) * (teams) + \
      32 * (warps_q) * (d) + FA_DECODE_PAGES_AHEAD(d) * 4 * 16 * FA_DECODE_PAGE_STEPS * (warps_q) * (teams) + 512) /  \
     128 * 128)

/* An fa_decode_cache is a view of keys or values. Strides count pieces of 16 bytes, modulo 2^32. */
typedef struct {
    const void *data;
    unsigned stride_b, stride_row, stride_h; /* stride_b: from page to page where there are pages */
} fa_decode_cache;

/* Members stand in the order of their use. Parameters come from memory in lines of 64 bytes, and the first access to
 * a line waits. */
typedef struct {
    const int *cu_seqlens_q; /* [b + 1]; NULL: dense queries */
    /* Where cluster_bits is n > 0, a cluster of 2^n CTAs shares the keys of one head. Clusters then take the place
     * of lanes, and `groups` counts the clusters of one head. */
    int cluster_bits;
    int b, h_kv, heads_per_kv;
    int len_q, total_q; /* of one sequence; packed: total_q bounds every offset */
    /* The rows of one key head lie between these bounds. Packed sequences with fewer or more rows belong to another
     * launch. */
    int min_rows, max_rows;
    int capacity;                  /* most keys of one sequence; packed keys: rows of the tensor */
    int len_new;                   /* number of appended keys, counted on top of seqused_k */
    const int *cu_seqlens_k;       /* [b + 1]; NULL: every sequence has a cache of its own */
    const int *seqused_k;          /* [b] keys before the append; NULL: all */
    const int *leftpad_k;          /* [b] leading keys to skip; NULL: none */
    const int *cache_batch_idx;    /* [b] row of the cache; NULL: identity */
    const int *block_table;        /* [num_caches, table_cols] page numbers; NULL: not paged, or a capacity of 0 */
    int window_left, window_right; /* -1: unlimited; causal is right = 0 */
    fa_division by_heads_per_kv, by_groups;

    int groups;      /* number of groups, each of `lanes` CTAs */
    int lanes;       /* CTAs side by side over the same keys, each in a head of its own; lanes divides h_kv */
    int head_blocks; /* h_kv / lanes */
    int num_splits;  /* 0: every group takes an equal share of all keys; n: every head's keys are cut into n parts */
    fa_division by_head_blocks;

    fa_decode_cache k, v;
    int d;
    int page_size, num_pages;
    int num_caches; /* rows of the cache, or of the block table if there is one */
    fa_division by_page_size;
    long long table_stride;
    const void *q;
    long long q_stride_b, q_stride_row, q_stride_h; /* in elements, like the strides of o */
    /* This kernel appends these keys and values, [b, len_new, h_kv, d]. data is NULL if there are no new keys, or if
     * kvcache.cu has appended the keys. */
    fa_decode_cache k_new, /* new keys */
        v_new;             /* new values */
    /* [rotary_rows, rotary_dim / 2]. NULL: there is no rotary embedding, or q is already turned. */
    const void *rotary_cos, *rotary_sin;
    int rotary_rows, rotary_dim, rotary_interleaved, rotary_q_by_row; /* as in ../flash_attn.h */

    float scale_log2;   /* scores times scale_log2 are exponents of 2 */
    int changes_scores; /* true for softcap, ALiBi, or a scale that is not positive: score_scale applies first */
    float score_scale, softcap; /* softcap 0: off */
    const float *alibi_slopes;  /* [h], or [b, h] with alibi_stride_b; NULL: none */
    long long alibi_stride_b;

    void *o;
    long long o_stride_b, o_stride_row, o_stride_h;
    /* [b, h, len_q], packed [h, total_q]: natural log of the row sums, or empty_lse for a row that sees no key. */
    float *lse;
    long long lse_stride_b, lse_stride_h;
    float *partial_o; /* [pieces, partial_rows, FA_DECODE_PART_ROW] */
    /* The counters start at zero, as [groups, lanes], or as [b, h_kv, max_q_tiles] with num_splits > 1. If
     * `counters` is NULL, the kernel uses its own counters. */
    unsigned *counters;
    int counter_slot;
    int max_q_tiles;  /* of one sequence */
    int partial_rows; /* rows of one piece in partial_o, at most the tile's rows */
    int h;
    int zero_tensors;    /* true: packed rows of o that belong to no sequence become zero */
    int attention_chunk; /* 0: off */
    float empty_lse;     /* +inf or -inf */
    fa_cuda_sinks sinks;
} fa_attn_decode_params;

#endif
