/* What the host hands to the decode kernel: filled in C, read in CUDA. Only types that both sides lay out alike. */
#ifndef FA_ATTN_DECODE_PARAMS_H
#define FA_ATTN_DECODE_PARAMS_H

#define FA_DECODE_MAX_CTAS      288  /* of one launch */
#define FA_DECODE_COUNTER_SLOTS 2048 /* per kernel, as gpu/slots.c gives them out; 2.4 MB */

#define FA_DECODE_MAX_CLUSTER   8  /* CTAs */
#define FA_DECODE_CLUSTER_BATCH 32 /* sequences of a launch with clusters: a lane looks after each */

/* Floats of a row of a part, if the CTAs of a cluster write it, each a slice of its columns with m and l of its own. */
#define FA_DECODE_SLICED_ROW(d, cluster) ((d) + 4 * (cluster))

#define FA_DECODE_MAX_NEW 8 /* keys of a sequence that this kernel appends; more are work for kvcache.cu */

/* Floats of a row of a part: O, not yet divided by the row sums; m in exponents of 2, l; 2 unused. */
#define FA_DECODE_PART_ROW(d) ((d) + 4)

/* Keys of one slot that one warp loads: fewer where the scores of 64 rows leave no registers. */
#define FA_DECODE_WARP_KEYS(d, warps_q) ((warps_q) == 4 && (d) > 128 ? 8 : 16)

/* Shared memory of one CTA: rings or, between pieces, results; queries; a few words. */
#define FA_DECODE_MAX(x, y) ((x) > (y) ? (x) : (y))
#define FA_DECODE_SHARED_BYTES(d, warps_q, teams, slots)                                                              \
    ((FA_DECODE_MAX(2 * (slots) * FA_DECODE_WARP_KEYS(d, warps_q) * (d), 16 * (4 * (d) + 40)) * (warps_q) * (teams) + \
      32 * (warps_q) * (d) + 512) /                                                                                   \
     128 * 128)

/* Division of numbers below 2^31 by one that the host knows: x magic >> shift, in 64 bits. */
typedef struct {
    unsigned magic, shift;
} fa_division;

/* A view of keys or values; strides count pieces of 16 bytes, modulo 2^32. */
typedef struct {
    const void *data;
    unsigned stride_b, stride_row, stride_h; /* stride_b: from page to page where there are pages */
} fa_decode_cache;

/* In the order of their use: parameters come from memory in lines of 64 bytes, and the first of a line is waited for. */
typedef struct {
    const int *cu_seqlens_q; /* [b + 1]; NULL: dense queries */
    int cluster_bits; /* n > 0: 2^n CTAs, a cluster, share keys of one head, in place of lanes; groups: of one head */
    int b, h_kv, heads_per_kv;
    int len_q, total_q;            /* of one sequence; packed: total_q bounds every offset */
    int min_rows, max_rows;        /* of one key head: packed sequences with fewer or more are another launch's */
    int capacity;                  /* keys that one sequence can have at most; packed keys: rows of the tensor */
    int len_new;                   /* keys that are appended: they count on top of seqused_k */
    const int *cu_seqlens_k;       /* [b + 1]; NULL: every sequence has a cache of its own */
    const int *seqused_k;          /* [b] keys before the append; NULL: all */
    const int *leftpad_k;          /* [b] leading keys to skip; NULL: none */
    const int *cache_batch_idx;    /* [b] row of the cache; NULL: identity */
    const int *block_table;        /* [num_caches, table_cols] page numbers; NULL: not paged, or a capacity of 0 */
    int window_left, window_right; /* -1: unlimited; causal is right = 0 */
    fa_division by_heads_per_kv, by_groups;

    int groups;      /* of `lanes` CTAs */
    int lanes;       /* CTAs that walk side by side over the same keys, each in a head of its own: divides h_kv */
    int head_blocks; /* h_kv / lanes */
    int num_splits;  /* 0: every group takes an equal share of all keys; n: every head's keys are cut into n */
    fa_division by_head_blocks;

    fa_decode_cache k, v;
    int d;
    int page_size, num_pages;
    int num_caches; /* rows of the cache (of the block table where there is one) */
    fa_division by_page_size;
    long long table_stride;
    const void *q;
    long long q_stride_b, q_stride_row, q_stride_h; /* in elements, as those of o */
    fa_decode_cache k_new,
        v_new; /* [b, len_new, h_kv, d], to be appended by this kernel; data NULL: nothing, or it is done */
    const void *rotary_cos, *rotary_sin; /* [rotary_rows, rotary_dim / 2]; NULL: nothing turns, or q has been turned */
    int rotary_rows, rotary_dim, rotary_interleaved, rotary_q_by_row; /* as in ../flash_attn.h */

    float scale_log2;           /* scores times this are exponents of 2 */
    int changes_scores;         /* softcap, ALiBi, or a scale that is not positive: score_scale comes first */
    float score_scale, softcap; /* softcap 0: off */
    const float *alibi_slopes;  /* [h], or [b, h] with alibi_stride_b; NULL: none */
    long long alibi_stride_b;

    void *o;
    long long o_stride_b, o_stride_row, o_stride_h;
    float *lse; /* [b, h, len_q], packed [h, total_q]: natural log of the row sums; +inf for a row that sees no key */
    long long lse_stride_b, lse_stride_h;
    float *partial_o;   /* [pieces, partial_rows, FA_DECODE_PART_ROW] */
    unsigned *counters; /* zero: [groups, lanes], with num_splits > 1 [b, h_kv, max_q_tiles]; NULL: the kernel's own */
    int counter_slot;
    int max_q_tiles;  /* of one sequence */
    int partial_rows; /* of one piece in partial_o: at most the tile's rows */
    int h;
    int zero_tensors; /* packed rows of o that belong to no sequence become zero */
} fa_attn_decode_params;

#endif
