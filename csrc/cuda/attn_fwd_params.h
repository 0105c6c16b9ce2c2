/* The parameters of attn_fwd_sm90. ../gpu/fwd_sm90.c fills them in C, and the kernel reads them in CUDA. So they have
 * only types that both sides lay out alike. */
#ifndef FA_ATTN_FWD_PARAMS_H
#define FA_ATTN_FWD_PARAMS_H

#include "division.h"
#include "sinks_params.h"
#include "tensor_map.h"

#define FA_TILE_COUNTERS 4096 /* Each kernel has these slots. gpu/slots.c gives a launch its slot. */

/* Shared memory that a CTA may have. An SM has 228 KiB, and each of its CTAs costs 1 KiB besides. */
#define FA_SHARED_BYTES_OF(ctas) (228 * 1024 / (ctas) - 1024)
#define FA_SHARED_BYTES          FA_SHARED_BYTES_OF(1)

/* Threads of a CTA: consumer warpgroups, and the warps that feed them. These have a warpgroup of their own, whose
 * registers go to the consumers. But two CTAs of 128 rows have room for 20 warps with 96 registers, and two warps feed
 * each. */
#define FA_FWD_FEW_REGISTERS(wgs, ctas) ((wgs) == 2 && (ctas) == 2)
#define FA_FWD_THREADS(wgs, ctas)       (128 * (wgs) + (FA_FWD_FEW_REGISTERS(wgs, ctas) ? 64 : 128))

/* attn_fwd_fp8_sm90 adds O of so many keys to its sums of 32 bits. Above 128 columns a flush costs more. */
#define FA_FLUSH_KEYS(d) ((d) > 128 ? 4096 : 2048)

/* One factor for each sequence and key head; data NULL: 1. */
typedef struct {
    const float *data;
    long long stride_b, stride_h;
} fa_attn_fwd_factors;

/* Rows of a cache that are loaded without a map. Strides count pieces of 16 bytes. */
typedef struct {
    const void *data;
    long long stride_h;
    unsigned stride_page, stride_row; /* Offsets in a head fit 32 bits. */
    int columns;
} fa_attn_fwd_rows;

/* A KV cache. Its maps have pages in place of sequences. A cache without pages has a page of `capacity` keys for each
 * of its rows, and no block table. */
typedef struct {
    const int *block_table; /* [rows, ..] page numbers; NULL: page i is row i */
    long long table_stride;
    int rows, num_pages, page_size;
    int capacity;                /* the most keys of a sequence */
    int box;                     /* keys of one load: a divisor of BLOCK_KV, and with a block table of page_size */
    const int *cache_batch_idx;  /* [b] the row of a sequence; NULL: its own number */
    const int *leftpad_k;        /* [b] keys to pass over, not with a block table; NULL: none */
    const int *cu_seqlens_k_new; /* [b + 1] new keys, of total_new; NULL: each sequence has len_new. Keys in use are */
    int len_new, total_new;      /* those of seqused_k or cu_seqlens_k and the new ones, which lie behind them. */
    int tile_heads,
        rows_of_head; /* A work tile has rows_of_head queries of each of tile_heads heads of one key head. */
    int h_in_tiles;   /* h / tile_heads */
    int rows_inverse; /* FA_ROWS_INVERSE(rows_of_head) */
    /* The keys of work tiles that are not packed are cut into num_parts parts. Each part is a work tile of its own.
     * With more than one, `lse` of the parameters is [part, b, h, row], of part_rows rows a part. O then goes to part_o
     * as floats: d_v of each row of lse, in their order. */
    int num_parts, part_rows;
    float *part_o;
    /* With SINGLE_KEYS, in place of the maps of K and V: */
    fa_attn_fwd_rows k, v;
    fa_division by_page_size;
    int page_groups[2]; /* with WHOLE_KEYS: groups of 8 keys from a page to the next one, of K and of V */
} fa_attn_fwd_cache;

/* row / rows is row * FA_ROWS_INVERSE(rows) / 2^16, for rows of a work tile. */
#define FA_ROWS_INVERSE(rows) ((1 << 16) / (rows) + 1)

typedef struct {
    fa_tensor_map q, k, v, o;

    float *lse; /* [b, h, len_q], packed [h, total_q]; empty_lse for a row that sees no key. NULL: not stored */
    long long lse_stride_b, lse_stride_h;
    void *o_data; /* o again, for kernels that store O without TMA; strides count elements */
    long long o_stride_b, o_stride_row, o_stride_h;

    int b, h, heads_per_kv, d_v;
    int len_q, len_kv;                      /* dense; packed: the bounds total_q and total_kv of every offset */
    const int *cu_seqlens_q, *cu_seqlens_k; /* [b + 1], packed only */
    const int *seqused_k;                   /* [b] keys in use, packed or in a cache; NULL: all */

    int num_q_tiles; /* dense: query tiles of one sequence */
    int num_tiles;   /* dense: num_q_tiles b h, or h_in_tiles with a cache */
    int group_heads; /* longest-first order: heads whose tiles interleave, so that their keys stay in the L2. Heads that
                       * share work tiles count as one. */
    int counter_slot; /* one of the kernel's tile counters; -1 is a static order */

    float scale_log2;              /* scores times this are exponents of 2 */
    float score_scale;             /* softcap and ALiBi: what S = Q K^T is multiplied by first */
    float softcap;                 /* 0: off */
    int window_left, window_right; /* -1: unlimited; causal is right = 0 */
    const float *alibi_slopes;     /* [h], or [b, h] with alibi_stride_b; NULL: none */
    long long alibi_stride_b;

    const unsigned long long *rng_state; /* dropout: (seed, offset) in device memory */
    int keep_max;                        /* a byte of the generator keeps its element iff byte <= keep_max */
    float keep_scale;                    /* 1 / (1 - p); 1 without dropout */

    const int *seqused_q; /* [b] queries in use, packed only; NULL: all */
    int attention_chunk;  /* with LOCAL; 0: off */
    float empty_lse;      /* +inf or -inf; +inf with sinks */
    fa_cuda_sinks sinks;

    fa_attn_fwd_factors q_descale, k_descale, v_descale; /* attn_fwd_fp8_sm90 alone: of Q, K and V, in device memory */
    float *sums; /* attn_fwd_fp8_sm90 above 128 columns: BLOCK_Q rows of d columns for each CTA; NULL: no sums */
    fa_attn_fwd_cache cache; /* with CACHE */
} fa_attn_fwd_params;

#endif
