/* Every family of GPU kernels, with its rows of cuda/tiles.def and the names of its variants. */
#include "kernel_table.h"

#include "cuda/attn_decode_params.h"
#include "cuda/attn_fwd_params.h"
#include "cuda/cuda_flex.h"
#include "cuda/quantize_params.h"

#include <stdio.h>
#include <string.h>

#define TEXT_OF(x)       #x
#define TEXT(x)          TEXT_OF(x)
#define ROWS_OF_1        64
#define DECODE_ROWS_OF_1 16
#define DECODE_ROWS_OF_2 32
#define DECODE_ROWS_OF_4 64
#define ROWS_OF_2        128
#define ROWS_OF_3        192
#define ROWS_OF_4        256
#define NUM_ROWS(x)      (int)(sizeof(x) / sizeof *(x))

/* The bytes of a row in the shared memory of kernels that use ldmatrix. */
#define PADDED_ROW(d, bytes) ((d) * (bytes) + 16)

/* ---- attn_fwd_sm90 --------------------------------------------------------------------------------------------- */

/* What a row's name says of d_v: nothing if d_v is d. */
#define V_32_32   ""
#define V_48_48   ""
#define V_64_64   ""
#define V_80_80   ""
#define V_96_96   ""
#define V_112_112 ""
#define V_128_128 ""
#define V_160_160 ""
#define V_192_192 ""
#define V_256_256 ""
#define V_64_256  "v256"
#define V_192_128 "v128"
#define V_64_128  "v128"

/* Tiles of 128 rows and 64 keys have a kernel for one CTA of an SM and one for two. */
#define OF_1_1 ""
#define OF_2_1 ""
#define OF_3_1 ""
#define OF_4_1 ""
#define OF_1_2 ""
#define OF_2_2 "x2"

/* TMA loads whole keys where their columns fill several chunks of 64. Of one chunk every box has whole keys. */
#define HAS_WHOLE_CHUNKS(d, d_v) ((d) % 64 == 0 && (d_v) % 64 == 0 && (d) + (d_v) > 128)

static const fa_row fwd_sm90_rows[] = {
#define FA_FWD_TILE_SM90(d, d_v, block_kv, wgs, stages, q_stages, turn, o_wait, ctas, cost, short_cost, serves) \
    {"attn_fwd_sm90_d" #d V_##d##_##d_v "_q" TEXT(ROWS_OF_##wgs) "kv" #block_kv OF_##wgs##_##ctas,              \
     {d, d_v, block_kv, wgs, stages, q_stages, turn, o_wait, ctas, cost, short_cost},                           \
     (serves) | ((serves) & FA_CACHE && (wgs) <= 2 ? FA_SINGLE_KEYS : 0u) |                                     \
         ((serves) & FA_CACHE && HAS_WHOLE_CHUNKS(d, d_v) ? FA_WHOLE_KEYS : 0u),                                \
     FA_SHARED_BYTES_OF(ctas)},
#include "cuda/tiles.def"
};

const fa_fwd_sm90_columns *fa_fwd_sm90_row(int row) { return (const fa_fwd_sm90_columns *)fwd_sm90_rows[row].columns; }

int fa_fwd_sm90_box(const fa_fwd_sm90_columns *t) {
    const bool fill_64 = t->d % 64 == 0 && t->d_v % 64 == 0, fill_32 = t->d % 32 == 0 && t->d_v % 32 == 0;
    const bool is_for_slow_rows = t->wgs > 2 && t->d > 64;
    return !fill_64 && fill_32 && !is_for_slow_rows ? 32 : 64;
}

/* gpu_fwd.c takes the row that costs a sequence least. A row is never chosen if an earlier row beats it. The earlier
 * row serves the same features, its steps have at least as many rows and keys, and a step costs no more. */
static bool fwd_sm90_chooses(int row, unsigned features) {
    const unsigned of_pages = features & (FA_SINGLE_KEYS | FA_WHOLE_KEYS);
    const unsigned wanted = (features & (FA_ALL_FEATURES | FA_CACHE)) | of_pages;
    if (features & FA_FLEX) return false; /* the functions of a call belong to such a kernel */
    if (of_pages && (!(features & FA_CACHE) || of_pages == (FA_SINGLE_KEYS | FA_WHOLE_KEYS))) return false;
    const fa_fwd_sm90_columns *mine = fa_fwd_sm90_row(row);
    for (int i = 0; i < row; i++) {
        const fa_fwd_sm90_columns *t = fa_fwd_sm90_row(i);
        if (t->d == mine->d && t->d_v == mine->d_v && t->wgs >= mine->wgs && t->block_kv >= mine->block_kv &&
            t->wgs * t->block_kv * t->cost <= mine->wgs * mine->block_kv * mine->cost &&
            t->wgs * t->block_kv * t->short_cost <= mine->wgs * mine->block_kv * mine->short_cost &&
            (fwd_sm90_rows[i].serves & wanted) == wanted)
            return false;
    }
    return true;
}

/* ---- attn_fwd_fp8_sm90 ----------------------------------------------------------------------------------------- */

static const fa_row fwd_fp8_sm90_rows[] = {
#define FA_FWD_FP8_TILE_SM90(d, block_kv, wgs, stages, raw_stages, q_stages, turn, o_wait, serves) \
    {"attn_fwd_fp8_sm90_d" #d "_q" TEXT(ROWS_OF_##wgs) "kv" #block_kv,                             \
     {d, block_kv, wgs, stages, raw_stages, q_stages, turn, o_wait},                               \
     serves,                                                                                       \
     FA_SHARED_BYTES},
#include "cuda/tiles.def"
};

const fa_fwd_fp8_sm90_columns *fa_fwd_fp8_sm90_row(int row) {
    return (const fa_fwd_fp8_sm90_columns *)fwd_fp8_sm90_rows[row].columns;
}

/* gpu_fwd_fp8.c takes the first row that fits. Each head dimension has one row for each set of features. */
static bool fwd_fp8_sm90_chooses(int row, unsigned features) {
    (void)row;
    return features & FA_IN_E4M3;
}

/* ---- attn_bwd_sm90, attn_bwd_wide_sm90 --------------------------------------------------------------------------- */

#define BWD_ROW(name, d, d_v, block_q, block_kv, serves, shared_bytes) \
    {name "_d" #d V_##d##_##d_v "_q" #block_q "kv" #block_kv, {d, d_v, block_q, block_kv}, serves, shared_bytes},

static const fa_row bwd_sm90_rows[] = {
#define FA_BWD_TILE_SM90(d, v, q, kv, serves) BWD_ROW("attn_bwd_sm90", d, v, q, kv, serves, FA_SHARED_BYTES)
#include "cuda/tiles.def"
};
static const fa_row bwd_wide_sm90_rows[] = {
#define FA_BWD_WIDE_TILE_SM90(d, v, q, kv, serves) BWD_ROW("attn_bwd_wide_sm90", d, v, q, kv, serves, FA_SHARED_BYTES)
#include "cuda/tiles.def"
};
static const fa_row bwd_prep_rows[] = {
#define FA_BWD_TILE_SM90(d, v, q, kv, serves)      BWD_ROW("attn_bwd_prep", d, v, q, kv, FA_VARLEN, 0)
#define FA_BWD_WIDE_TILE_SM90(d, v, q, kv, serves) BWD_ROW("attn_bwd_prep", d, v, q, kv, FA_VARLEN, 0)
#include "cuda/tiles.def"
};

const fa_bwd_sm90_columns *fa_bwd_sm90_row(fa_family_id family, int row) {
    return (const fa_bwd_sm90_columns *)fa_families[family].rows[row].columns;
}

/* Are this row and the next one for the same columns? */
static bool has_double(int row) {
    return row >= 0 && row + 1 < NUM_ROWS(bwd_sm90_rows) &&
           bwd_sm90_rows[row].columns[0] == bwd_sm90_rows[row + 1].columns[0];
}

bool fa_bwd_sm90_takes(int row, bool is_heavy) { return is_heavy ? !has_double(row - 1) : !has_double(row); }

/* gpu_bwd.c takes the first row that fits. The functions of a call belong to a kernel with FA_FLEX. */
static bool bwd_wide_sm90_chooses(int row, unsigned features) {
    (void)row;
    return !(features & FA_FLEX);
}
static bool bwd_sm90_chooses(int row, unsigned features) {
    const bool is_heavy = features & (FA_SCORE | FA_DROPOUT);
    return !(features & FA_FLEX || (features & FA_ALIBI && is_heavy)) && fa_bwd_sm90_takes(row, is_heavy);
}

/* ---- attn_fwd_sm80 --------------------------------------------------------------------------------------------- */

#define MOST(x, y) ((x) > (y) ? (x) : (y))
/* Rows of a CTA: WARPS of BLOCKS times 16 rows, which SPLIT warps share. */
#define ROWS_OF_4x1   64
#define ROWS_OF_4x2   128
#define ROWS_OF_4x2x1 128
#define ROWS_OF_8x1x1 128
#define ROWS_OF_8x2x1 256
#define ROWS_OF_8x2x2 128
#define Q_REGS_0
#define Q_REGS_1 "r"

static const fa_row fwd_sm80_rows[] = {
/* The struct shared_memory of attn_fwd_sm80_tiles.cuh. Q has a place of its own, or comes to registers through that of
 * V. P has a place where warps share rows. Rows are padded, unless warps share rows and there are two stages. */
#define SHARED(d, rows, kv, stages, q_regs, split)                                           \
    ((split) > 1 && (stages) == 2 ? 2 * (d) * (4 * (kv) + (rows)) + (rows) * (16 + 2 * (kv)) \
                                  : PADDED_SHARED(d, rows, kv, stages, q_regs, split))
#define PADDED_SHARED(d, rows, kv, stages, q_regs, split)                                                           \
    (PADDED_ROW(d, 2) * ((q_regs) ? (stages) * (kv) + MOST((stages) * (kv), rows) : 2 * (stages) * (kv) + (rows)) + \
     ((q_regs) ? 4 * (rows) : 0) + ((split) > 1 ? PADDED_ROW(kv, 2) * (rows) : 0))
#define FA_FWD_TILE_SM80(d, kv, warps, blocks, split, stages, q_regs, lane_regs, late, ahead, short_ends, ctas) \
    {"attn_fwd_sm80_d" #d "_q" TEXT(ROWS_OF_##warps##x##blocks##x##split) "kv" #kv "s" #stages Q_REGS_##q_regs, \
     {d, kv, warps, blocks, split, stages, q_regs, lane_regs, late, ahead, short_ends, ctas},                   \
     FA_SCORE | FA_DROPOUT | FA_CACHE,                                                                          \
     SHARED(d, 16 * (warps) * (blocks) / (split), kv, stages, q_regs, split)},
#include "cuda/tiles.def"
};

const fa_fwd_sm80_columns *fa_fwd_sm80_row(int row) { return (const fa_fwd_sm80_columns *)fwd_sm80_rows[row].columns; }

/* ---- attn_bwd_sm80 --------------------------------------------------------------------------------------------- */

/* The struct shared_memory of attn_bwd_sm80.cu. V has a place of its own, or comes to registers through the place of
 * the query tiles. dS has two places where each key has one warp of a group. Where more warps share keys, P has one of
 * them. Rows are padded, unless two groups of warps have rows of whole 128 bytes. Two groups have what dropout keeps,
 * too. */
#define GROUPS_1
#define GROUPS_2                           "g2"
#define SM80_ROW_BYTES(columns, d, groups) ((groups) == 2 && (d) % 64 == 0 ? (columns) * 2 : PADDED_ROW(columns, 2))
#define SM80_KEPT_BYTES(q, kv, warps, groups, blocks, chunk)                                                   \
    ((groups) == 2                                                                                             \
         ? (q) * (kv) / (8 * (warps) * (blocks)) / (chunk) * (((blocks) * (chunk) / 8 + 7) / 8) * 64 * (warps) \
         : 16)
#define SM80_SHARED(d, q, kv, warps, groups, blocks, chunk, stages, v_regs)                                          \
    (SM80_ROW_BYTES(d, d, groups) * ((kv) + ((v_regs) ? MOST(2 * (stages) * (q), kv) : 2 * (stages) * (q) + (kv))) + \
     32 + 2 * (kv) * SM80_ROW_BYTES(q, d, groups) + 16 * (q) + 16 +                                                  \
     SM80_KEPT_BYTES(q, kv, warps, groups, blocks, chunk))
#define SM80_ROW(name, d, q, kv, warps, groups, blocks, chunk, stages, k_regs, v_regs, kept, ahead, ctas, serves, \
                 shared_bytes)                                                                                    \
    {name "_d" #d "_q" #q "kv" #kv "w" #warps GROUPS_##groups,                                                    \
     {d, q, kv, warps, groups, blocks, chunk, stages, k_regs, v_regs, kept, ahead, ctas},                         \
     serves,                                                                                                      \
     shared_bytes},

static const fa_row bwd_sm80_rows[] = {
#define FA_BWD_TILE_SM80(d, q, kv, warps, groups, blocks, chunk, stages, k_regs, v_regs, kept, ahead, ctas)      \
    SM80_ROW("attn_bwd_sm80", d, q, kv, warps, groups, blocks, chunk, stages, k_regs, v_regs, kept, ahead, ctas, \
             FA_SCORE | FA_DROPOUT, SM80_SHARED(d, q, kv, warps, groups, blocks, chunk, stages, v_regs))
#include "cuda/tiles.def"
};
static const fa_row bwd_dq_sm80_rows[] = {
#define FA_BWD_TILE_SM80(d, q, kv, warps, groups, blocks, chunk, stages, k_regs, v_regs, kept, ahead, ctas)            \
    SM80_ROW("attn_bwd_dq_sm80", d, q, kv, warps, groups, blocks, chunk, stages, k_regs, v_regs, kept, ahead, ctas, 0, \
             0)
#include "cuda/tiles.def"
};

const fa_bwd_sm80_columns *fa_bwd_sm80_row(int row) { return (const fa_bwd_sm80_columns *)bwd_sm80_rows[row].columns; }

/* Rows of two groups of warps are for bf16. The row behind such a row has the same columns, and is for fp16. */
static bool bwd_sm80_chooses(int row, unsigned features) {
    const bool is_bf16 = (features & FA_IN_BF16) != 0;
    if (fa_bwd_sm80_row(row)->groups == 2) return is_bf16;
    return !is_bf16 || row == 0 || fa_bwd_sm80_row(row - 1)->groups == 1;
}

/* ---- attn_fwd_short, attn_bwd_short ------------------------------------------------------------------------------ */

/* The units of a CTA have SHORT_ROWS rows together. */
#define SHORT_ROWS     64
#define SHORT_FEATURES (FA_VARLEN | FA_SCORE | FA_DROPOUT)
#define SHORT_FILES    "short_units.cuh", "short_mods.cuh", "short_longer.cuh", "quads.cuh", TILE_ANY_FILES, FLEX_FILES
#define SHORT_ROW(name, d, rows, ctas, shared_bytes) \
    {name "_d" #d "_q" #rows "kv" #rows, {d, rows, ctas}, SHORT_FEATURES | FA_FLEX, SHORT_ROWS * (shared_bytes)},

static const fa_row fwd_short_rows[] = {
#define FA_FWD_TILE_SHORT(d, rows, ctas) SHORT_ROW("attn_fwd_short", d, rows, ctas, 3 * PADDED_ROW(d, 2))
#include "cuda/tiles.def"
};
static const fa_row bwd_short_rows[] = {
#define FA_BWD_TILE_SHORT(d, rows, ctas) \
    SHORT_ROW("attn_bwd_short", d, rows, ctas, 4 * PADDED_ROW(d, 2) + 2 * PADDED_ROW(rows, 2))
#include "cuda/tiles.def"
};

static bool short_chooses(int row, unsigned features) {
    (void)row;
    return !(features & FA_FLEX); /* the functions of a call belong to such a kernel */
}

const fa_short_columns *fa_short_row(fa_family_id family, int row) {
    return (const fa_short_columns *)fa_families[family].rows[row].columns;
}

/* ---- the generic kernels ----------------------------------------------------------------------------------------- */

#define ROWS_OF_2x1 32

static const fa_row fwd_any_rows[] = {
#define FA_FWD_TILE_ANY(d, block_kv, warps, blocks, stages, ctas, bytes)       \
    {"attn_fwd_any_d" #d "_q" TEXT(ROWS_OF_##warps##x##blocks) "kv" #block_kv, \
     {d, block_kv, warps, blocks, stages, ctas, bytes},                        \
     FA_OF_3,                                                                  \
     PADDED_ROW(d, bytes) * (16 * (warps) * (blocks) + 2 * (stages) * (block_kv))},
#include "cuda/tiles.def"
#undef FA_FWD_TILE_ANY
};

static const fa_row bwd_any_rows[] = {
#define FA_BWD_TILE_ANY(d, gradients, walk, warps, blocks, stages, ctas, bytes)                          \
    {"attn_bwd_any_" #gradients "_d" #d "_q" TEXT(ROWS_OF_##warps##x##blocks) "kv" #walk,                \
     {d, walk, warps, blocks, stages, ctas, GRAD_##gradients, bytes},                                    \
     FA_OF_3,                                                                                            \
     PADDED_ROW(d, bytes) *                                                                              \
             (16 * (warps) * (blocks) * (GRAD_##gradients == GRAD_dv ? 1 : 2) + 2 * (stages) * (walk)) + \
         (GRAD_##gradients == GRAD_dv ? 8 * (bytes) : 0)},
#include "cuda/tiles.def"
#undef FA_BWD_TILE_ANY
};

static const fa_row delta_any_rows[] = {{.name = "attn_delta_any", .serves = FA_OF_3 | FA_FLEX}};
static const fa_row flex_blocks_rows[] = {{.name = "flex_blocks"}};
static const fa_row flex_classify_rows[] = {{.name = "flex_classify"}};
static const fa_row flex_lists_rows[] = {{.name = "flex_lists"}};
static const fa_row flex_exact_sums_rows[] = {{.name = "flex_exact_sums"}};
static const fa_row flex_hidden_rows[] = {{.name = "flex_hidden"}};
static const fa_row flex_walks_rows[] = {{.name = "flex_walks", .shared_bytes = FA_FLEX_WALKS_SHARED_BYTES}};
static const fa_row probs_any_rows[] = {
    {.name = "attn_probs_any", .serves = FA_OF_3, .shared_bytes = 192 * PADDED_ROW(FA_MAX_HEAD_DIM, 2)}};
static const fa_row kvcache_rows[] = {{.name = "kvcache", .serves = FA_OF_3}};
static const fa_row gather_rows[] = {{.name = "gather"}};
static const fa_row align_rows[] = {{.name = "align"}};
static const fa_row sinks_rows[] = {{.name = "sinks"}};
static const fa_row sinks_grad_rows[] = {{.name = "sinks_grad"}};
static const fa_row bias_shift_rows[] = {{.name = "bias_shift"}};
static const fa_row max_logits_rows[] = {{.name = "max_logits"}};
static const fa_row combine_rows[] = {{.name = "combine"}};

const fa_fwd_any_columns *fa_fwd_any_row(int row) { return (const fa_fwd_any_columns *)fwd_any_rows[row].columns; }
const fa_bwd_any_columns *fa_bwd_any_row(int row) { return (const fa_bwd_any_columns *)bwd_any_rows[row].columns; }

/* e4m3 is an addition of flash-attn 3. Only beside a user's functions is dropout a constant of the text. */
static bool any_chooses(int row, unsigned features) {
    (void)row;
    return (!(features & FA_IN_E4M3) || (features & FA_OF_3)) && !(features & FA_DROPOUT);
}

static bool fwd_any_chooses(int row, unsigned features) {
    return any_chooses(row, features) && (fa_fwd_any_row(row)->factor_bytes == 4) == ((features & FA_IN_F32) != 0);
}

static bool bwd_any_chooses(int row, unsigned features) {
    return any_chooses(row, features) && (fa_bwd_any_row(row)->factor_bytes == 4) == ((features & FA_IN_F32) != 0);
}

/* Programmable attention has the additions of flash-attn 3. */
static bool delta_any_chooses(int row, unsigned features) {
    (void)row;
    return !(features & FA_FLEX) || (features & FA_OF_3);
}

/* A kernel that exists only with a user's function. */
static bool never_chooses(int row, unsigned features) {
    (void)row, (void)features;
    return false;
}

static bool always_chooses(int row, unsigned features) {
    (void)row, (void)features;
    return true;
}

/* ---- attn_decode_sm90, attn_decode_sm80 -------------------------------------------------------------------------- */

/* The kernel reads its options when it runs. */
#define DECODE_ROW(name, d, warps_q, teams, slots, ctas, is_hopper) \
    {name, {d, warps_q, teams, slots, ctas, is_hopper}, FA_FLEX, FA_DECODE_SHARED_BYTES(d, warps_q, teams, slots)},

static const fa_row decode_sm90_rows[] = {
#define FA_DECODE_TILE_SM90(d, warps_q, teams, slots, ctas) \
    DECODE_ROW("attn_decode_sm90_d" #d "_q" TEXT(DECODE_ROWS_OF_##warps_q), d, warps_q, teams, slots, ctas, 1)
#include "cuda/tiles.def"
};
static const fa_row decode_sm80_rows[] = {
#define FA_DECODE_TILE_SM80(d, warps_q, teams, slots, ctas)                                                          \
    DECODE_ROW("attn_decode_sm80_d" #d "_q" TEXT(DECODE_ROWS_OF_##warps_q) "t" #teams "s" #slots, d, warps_q, teams, \
               slots, ctas, 0)
#include "cuda/tiles.def"
};

static bool decode_chooses(int row, unsigned features) {
    (void)row;
    return !(features & FA_FLEX); /* the functions of a call belong to such a kernel */
}

const fa_gpu_decode_columns *fa_gpu_decode_row(fa_family_id family, int row) {
    return (const fa_gpu_decode_columns *)fa_families[family].rows[row].columns;
}

/* ---- quantize ---------------------------------------------------------------------------------------------------- */

static const fa_row quantize_rows[] = {
#define FA_QUANTIZE_TILE(name, rotates, slot_kb, ctas) \
    {"quantize_" #name, {rotates, slot_kb, ctas}, 0, FA_QUANTIZE_SHARED_BYTES(slot_kb)},
#include "cuda/tiles.def"
};

const fa_quantize_columns *fa_quantize_row(int row) { return (const fa_quantize_columns *)quantize_rows[row].columns; }

/* A list of files, with NULL at its end. NVRTC refuses a list that names a file twice. */
#define FILES(...)    ((const char *const[]){__VA_ARGS__, NULL})
#define PROBLEM_FILES "cuda_problem.h", "sinks_params.h", "division.h"
#define MASK_FILES    "walk.cuh", "mask.cuh", "integers.cuh"
#define SCORE_FILES   "score.cuh", MASK_FILES
#define PTX_FILES     "ptx_cluster.cuh", "ptx_launch.cuh", "ptx_sm80.cuh", "element.cuh"
#define SM90_FILES    "ptx_sm90.cuh", PTX_FILES, "tensor_map.h", "packed.cuh", SCORE_FILES
#define BWD_FILES     "attn_bwd_slabs.cuh", "attn_bwd_params.h", SM90_FILES
#define BWD_STEP_FILES \
    "attn_bwd_scores.cuh", "attn_bwd_tiles.cuh", "attn_bwd_mods.cuh", "attn_bwd_dropout.cuh", "philox.cuh", "quads.cuh"
#define BWD_MODS_FILES "attn_bwd_captures.cuh", "attn_bwd_pairs.cuh", "pair_octets.cuh"
#define STEP_FILES \
    "attn_fwd_softmax.cuh", "attn_fwd_repeats.cuh", "attn_fwd_output.cuh", "philox.cuh", "quads.cuh", "sinks.cuh"
#define WORK_FILES     "key_walk.cuh", "attn_fwd_mods.cuh", "attn_fwd_tiles.cuh"
#define DIVISION_FILES "division.cuh", "division.h"
#define FEED_FILES                                                                                                    \
    DIVISION_FILES, "attn_fwd_memory.cuh", "attn_fwd_producer.cuh", "attn_fwd_cache.cuh", "attn_fwd_single_keys.cuh", \
        WORK_FILES
#define FWD_FILES "attn_fwd_schedule.cuh", "attn_fwd_consumer.cuh", "attn_fwd_params.h", STEP_FILES, FEED_FILES

/* ---- the table --------------------------------------------------------------------------------------------------- */

#define ANY_FILES      PROBLEM_FILES, "sequence.cuh", "element.cuh", "ptx_sm80.cuh", MASK_FILES
#define TILE_ANY_FILES ANY_FILES, "tile_any.cuh", "score.cuh", "philox.cuh", "e4m3.cuh"
#define FLEX_FILES     "flex.cuh", "flex_blocks.cuh", "cuda_flex.h", "flex_values.cuh"
#define BLOCKS_FILES   "flex_blocks.cuh", "cuda_flex.h", PROBLEM_FILES, "integers.cuh"
#define BWD_SM80_FILES "attn_bwd_sm80.cuh", "attn_bwd_sm80_params.h", "quads.cuh"
#define DECODE_FILES                                                                                              \
    "attn_decode.cu", PTX_FILES, "attn_decode_params.h", DIVISION_FILES, SCORE_FILES, "attn_decode_schedule.cuh", \
        "attn_decode_loads.cuh", "attn_decode_softmax.cuh", "attn_decode_merge.cuh", "attn_decode_append.cuh",    \
        "sinks.cuh", "sinks_params.h", "cuda_problem.h", FLEX_FILES
#define DECODE_COLUMNS "HEAD_DIM", "WARPS_Q", "TEAMS", "SLOTS", "CTAS", "HOPPER"
#define ANY_KNOWS      FA_IN_BF16 | FA_IN_F32 | FA_OF_3

const fa_family fa_families[FA_NUM_FAMILIES] = {
    [FA_FWD_SM90] = {.name = "attn_fwd_sm90",
                     .files = FILES("attn_fwd_sm90.cu", "attn_fwd_pairs.cuh", "pair_octets.cuh", FWD_FILES, SM90_FILES,
                                    FLEX_FILES, "cuda_problem.h", "sinks_params.h"),
                     .arch = 90,
                     .columns = {"D_QK", "D_V", "BLOCK_KV", "WGS", "STAGES", "Q_STAGES", "TURN", "O_WAIT", "CTAS"},
                     .knows = FA_ALL_FEATURES | FA_CACHE | FA_SINGLE_KEYS | FA_WHOLE_KEYS | FA_FLEX | FA_IN_BF16,
                     .rows = fwd_sm90_rows,
                     .num_rows = NUM_ROWS(fwd_sm90_rows),
                     .chooses = fwd_sm90_chooses,
                     .aligns_shared = true,
                     .takes_mods = true,
                     .stores_lse_if_wanted = true},
    [FA_FWD_FP8_SM90] = {.name = "attn_fwd_fp8_sm90",
                         .files = FILES("attn_fwd_fp8_sm90.cu", "attn_fwd_fp8_values.cuh", FWD_FILES, SM90_FILES,
                                        "sinks_params.h"),
                         .arch = 90,
                         .columns = {"HEAD_DIM", "BLOCK_KV", "WGS", "STAGES", "RAW_STAGES", "Q_STAGES", "TURN",
                                     "O_WAIT"},
                         .knows = FA_CAUSAL | FA_LOCAL | FA_VARLEN | FA_SCORE | FA_IN_E4M3,
                         .rows = fwd_fp8_sm90_rows,
                         .num_rows = NUM_ROWS(fwd_fp8_sm90_rows),
                         .chooses = fwd_fp8_sm90_chooses,
                         .aligns_shared = true,
                         .stores_lse_if_wanted = true},
    [FA_BWD_SM90] = {.name = "attn_bwd_sm90",
                     .files = FILES("attn_bwd_sm90.cu", "attn_bwd_writers.cuh", "attn_bwd_memory.cuh", BWD_STEP_FILES,
                                    BWD_FILES, FLEX_FILES, BWD_MODS_FILES, PROBLEM_FILES),
                     .arch = 90,
                     .columns = {"HEAD_DIM", "D_V", "BLOCK_Q", "BLOCK_KV"},
                     .knows = FA_ALL_FEATURES | FA_FLEX | FA_ALIBI | FA_IN_BF16,
                     .takes_mods = true,
                     .rows = bwd_sm90_rows,
                     .num_rows = NUM_ROWS(bwd_sm90_rows),
                     .chooses = bwd_sm90_chooses,
                     .aligns_shared = true},
    [FA_BWD_WIDE_SM90] = {.name = "attn_bwd_wide_sm90",
                          .files = FILES("attn_bwd_wide_sm90.cu", "attn_bwd_wide_two.cuh", "attn_bwd_wide_three.cuh",
                                         "attn_bwd_wide_parts.cuh", BWD_STEP_FILES, BWD_FILES, FLEX_FILES,
                                         BWD_MODS_FILES, PROBLEM_FILES),
                          .arch = 90,
                          .columns = {"HEAD_DIM", "D_V", "BLOCK_Q", "BLOCK_KV"},
                          .knows = FA_ALL_FEATURES | FA_FLEX | FA_IN_BF16,
                          .takes_mods = true,
                          .rows = bwd_wide_sm90_rows,
                          .num_rows = NUM_ROWS(bwd_wide_sm90_rows),
                          .chooses = bwd_wide_sm90_chooses,
                          .aligns_shared = true},
    [FA_BWD_PREP_SM90] = {.name = "attn_bwd_prep",
                          .files = FILES("attn_bwd_prep.cu", "dot.cuh", BWD_FILES),
                          .arch = 90,
                          .columns = {"HEAD_DIM", "D_V", "BLOCK_Q", "BLOCK_KV"},
                          .knows = FA_VARLEN | FA_IN_BF16,
                          .rows = bwd_prep_rows,
                          .num_rows = NUM_ROWS(bwd_prep_rows),
                          .chooses = always_chooses},
    [FA_FWD_ANY] = {.name = "attn_fwd_any",
                    .files = FILES("attn_fwd_any.cu", "softmax_any.cuh", "rows_any.cuh", "sinks.cuh", TILE_ANY_FILES,
                                   FLEX_FILES),
                    .columns = {"HEAD_DIM", "BLOCK_KV", "WARPS", "BLOCKS", "STAGES", "CTAS"},
                    .knows = ANY_KNOWS | FA_IN_E4M3 | FA_FLEX | FA_DROPOUT,
                    .rows = fwd_any_rows,
                    .num_rows = NUM_ROWS(fwd_any_rows),
                    .chooses = fwd_any_chooses,
                    .takes_mods = true},
    [FA_BWD_ANY] = {.name = "attn_bwd_any",
                    .files = FILES("attn_bwd_any.cu", TILE_ANY_FILES, FLEX_FILES, "flex_exact_sums.cuh"),
                    .columns = {"HEAD_DIM", "WALK", "WARPS", "BLOCKS", "STAGES", "CTAS", "GRAD"},
                    .knows = ANY_KNOWS | FA_FLEX | FA_DROPOUT,
                    .rows = bwd_any_rows,
                    .num_rows = NUM_ROWS(bwd_any_rows),
                    .chooses = bwd_any_chooses,
                    .takes_mods = true},
    [FA_DELTA_ANY] = {.name = "attn_delta_any",
                      .files = FILES("attn_delta_any.cu", "dot.cuh", "cuda_flex.h", ANY_FILES),
                      .knows = ANY_KNOWS | FA_FLEX,
                      .rows = delta_any_rows,
                      .num_rows = NUM_ROWS(delta_any_rows),
                      .chooses = delta_any_chooses},
    [FA_FWD_SM80] = {.name = "attn_fwd_sm80",
                     .files =
                         FILES("attn_fwd_sm80.cu", "attn_fwd_sm80_tiles.cuh", "attn_fwd_sm80_products.cuh",
                               "attn_fwd_sm80_softmax.cuh", "attn_fwd_sm80_cache.cuh", "division.cuh", "tile_sm80.cuh",
                               "rows_any.cuh", "quads.cuh", "sinks.cuh", "task_order.cuh", TILE_ANY_FILES),
                     .columns = {"HEAD_DIM", "BLOCK_KV", "WARPS", "BLOCKS", "SPLIT", "STAGES", "Q_REGS", "LANE_REGS",
                                 "LATE", "AHEAD", "SHORT_ENDS", "CTAS"},
                     .knows = FA_SCORE | FA_DROPOUT | FA_CACHE | FA_IN_BF16,
                     .rows = fwd_sm80_rows,
                     .num_rows = NUM_ROWS(fwd_sm80_rows),
                     .chooses = always_chooses},
    [FA_BWD_SM80] = {.name = "attn_bwd_sm80",
                     .files = FILES("attn_bwd_sm80.cu", "attn_bwd_sm80_products.cuh", "attn_bwd_sm80_weights.cuh",
                                    "tile_sm80.cuh", "task_order.cuh", BWD_SM80_FILES, TILE_ANY_FILES),
                     .columns = {"HEAD_DIM", "BLOCK_Q", "BLOCK_KV", "WARPS", "GROUPS", "BLOCKS", "CHUNK", "STAGES",
                                 "K_REGS", "V_REGS", "KEPT", "AHEAD", "CTAS"},
                     .knows = FA_SCORE | FA_DROPOUT | FA_IN_BF16,
                     .rows = bwd_sm80_rows,
                     .num_rows = NUM_ROWS(bwd_sm80_rows),
                     .chooses = bwd_sm80_chooses},
    [FA_BWD_DQ_SM80] = {.name = "attn_bwd_dq_sm80",
                        .files = FILES("attn_bwd_dq_sm80.cu", BWD_SM80_FILES, ANY_FILES, "score.cuh"),
                        .columns = {"HEAD_DIM", "BLOCK_Q", "BLOCK_KV", "WARPS", "GROUPS", "BLOCKS", "CHUNK", "STAGES",
                                    "K_REGS", "V_REGS", "KEPT", "AHEAD", "CTAS"},
                        .knows = FA_IN_BF16,
                        .rows = bwd_dq_sm80_rows,
                        .num_rows = NUM_ROWS(bwd_dq_sm80_rows),
                        .chooses = bwd_sm80_chooses},
    [FA_FWD_SHORT] = {.name = "attn_fwd_short",
                      .files = FILES("attn_fwd_short.cu", "softmax_any.cuh", "rows_any.cuh", "sinks.cuh", SHORT_FILES),
                      .columns = {"HEAD_DIM", "UNIT_ROWS", "CTAS"},
                      .knows = SHORT_FEATURES | FA_FLEX | FA_IN_BF16,
                      .rows = fwd_short_rows,
                      .num_rows = NUM_ROWS(fwd_short_rows),
                      .chooses = short_chooses,
                      .takes_mods = true},
    [FA_BWD_SHORT] = {.name = "attn_bwd_short",
                      .files = FILES("attn_bwd_short.cu", "dot.cuh", SHORT_FILES),
                      .columns = {"HEAD_DIM", "UNIT_ROWS", "CTAS"},
                      .knows = SHORT_FEATURES | FA_FLEX | FA_IN_BF16,
                      .rows = bwd_short_rows,
                      .num_rows = NUM_ROWS(bwd_short_rows),
                      .chooses = short_chooses,
                      .takes_mods = true},
    [FA_FLEX_BLOCKS] = {.name = "flex_blocks",
                        .files = FILES("flex_blocks.cu", "flex_map.cuh", BLOCKS_FILES),
                        .rows = flex_blocks_rows,
                        .num_rows = NUM_ROWS(flex_blocks_rows),
                        .chooses = always_chooses},
    [FA_FLEX_CLASSIFY] = {.name = "flex_classify",
                          .files = FILES("flex_classify.cu", BLOCKS_FILES, "flex_values.cuh", "flex_bounds.cuh",
                                         "flex_bounds.h"),
                          .knows = FA_FLEX,
                          .rows = flex_classify_rows,
                          .num_rows = NUM_ROWS(flex_classify_rows),
                          .chooses = never_chooses,
                          .takes_mods = true},
    [FA_FLEX_LISTS] = {.name = "flex_lists",
                       .files = FILES("flex_lists.cu", BLOCKS_FILES),
                       .rows = flex_lists_rows,
                       .num_rows = NUM_ROWS(flex_lists_rows),
                       .chooses = always_chooses},
    [FA_FLEX_EXACT_SUMS] = {.name = "flex_exact_sums",
                            .files = FILES("flex_exact_sums.cu", "flex_exact_sums.cuh", "cuda_flex.h", PROBLEM_FILES),
                            .rows = flex_exact_sums_rows,
                            .num_rows = NUM_ROWS(flex_exact_sums_rows),
                            .chooses = always_chooses},
    [FA_FLEX_WALKS] = {.name = "flex_walks",
                       .files = FILES("flex_walks.cu", "flex_map.cuh", "ptx_launch.cuh", BLOCKS_FILES),
                       .arch = 90,
                       .rows = flex_walks_rows,
                       .num_rows = NUM_ROWS(flex_walks_rows),
                       .chooses = always_chooses},
    [FA_FLEX_HIDDEN] = {.name = "flex_hidden",
                        .files = FILES("flex_hidden.cu", "ptx_launch.cuh", FLEX_FILES, PROBLEM_FILES, "integers.cuh"),
                        .arch = 90,
                        .knows = FA_FLEX,
                        .rows = flex_hidden_rows,
                        .num_rows = NUM_ROWS(flex_hidden_rows),
                        .chooses = never_chooses,
                        .takes_mods = true},
    [FA_PROBS_ANY] = {.name = "attn_probs_any",
                      .files = FILES("attn_probs_any.cu", "rows_any.cuh", TILE_ANY_FILES),
                      .knows = ANY_KNOWS,
                      .rows = probs_any_rows,
                      .num_rows = NUM_ROWS(probs_any_rows),
                      .chooses = always_chooses},
    [FA_KVCACHE] = {.name = "kvcache",
                    .files = FILES("kvcache.cu", ANY_FILES, "e4m3.cuh"),
                    .knows = ANY_KNOWS | FA_IN_E4M3,
                    .rows = kvcache_rows,
                    .num_rows = NUM_ROWS(kvcache_rows),
                    .chooses = any_chooses},
    [FA_GATHER] = {.name = "gather",
                   .files = FILES("gather.cu", "gather_params.h", "sequence.cuh", PROBLEM_FILES, MASK_FILES),
                   .arch = 90,
                   .rows = gather_rows,
                   .num_rows = NUM_ROWS(gather_rows),
                   .chooses = always_chooses},
    [FA_ALIGN] = {.name = "align",
                  .files = FILES("align.cu", "align_params.h", PROBLEM_FILES, "division.cuh", "integers.cuh"),
                  .rows = align_rows,
                  .num_rows = NUM_ROWS(align_rows),
                  .chooses = always_chooses},
    [FA_COMBINE] = {.name = "combine",
                    .files = FILES("combine.cu", "combine_params.h", DIVISION_FILES, "sinks.cuh", "sinks_params.h",
                                   "element.cuh", "ptx_launch.cuh", "ptx_sm80.cuh"),
                    .knows = FA_IN_BF16 | FA_IN_F32,
                    .rows = combine_rows,
                    .num_rows = NUM_ROWS(combine_rows),
                    .chooses = always_chooses},
    [FA_SINKS] = {.name = "sinks",
                  .files = FILES("sinks.cu", "sinks.cuh", "sinks_params.h", "element.cuh", "ptx_sm80.cuh"),
                  .knows = FA_IN_BF16 | FA_IN_F32,
                  .rows = sinks_rows,
                  .num_rows = NUM_ROWS(sinks_rows),
                  .chooses = always_chooses},
    [FA_SINKS_GRAD] = {.name = "sinks_grad",
                       .files = FILES("sinks_grad.cu", "sinks.cuh", "sinks_params.h", "element.cuh", "ptx_sm80.cuh"),
                       .rows = sinks_grad_rows,
                       .num_rows = NUM_ROWS(sinks_grad_rows),
                       .chooses = always_chooses},
    [FA_MAX_LOGITS] = {.name = "max_logits",
                       .files = FILES("max_logits.cu", "max_logits_params.h", "sinks.cuh", "sinks_params.h",
                                      "element.cuh", "ptx_sm80.cuh"),
                       .rows = max_logits_rows,
                       .num_rows = NUM_ROWS(max_logits_rows),
                       .chooses = always_chooses},
    [FA_BIAS_SHIFT] = {.name = "bias_shift",
                       .files = FILES("bias_shift.cu", "bias_shift_params.h", "sinks.cuh", "sinks_params.h",
                                      "element.cuh", "ptx_sm80.cuh"),
                       .knows = FA_IN_BF16 | FA_IN_F32,
                       .rows = bias_shift_rows,
                       .num_rows = NUM_ROWS(bias_shift_rows),
                       .chooses = always_chooses},
    [FA_QUANTIZE] = {.name = "quantize",
                     .files = FILES("quantize.cu", "ptx_once.cuh", "e4m3.cuh", "ptx_sm80.cuh", "element.cuh",
                                    "quantize_params.h"),
                     .columns = {"ROTATES", "SLOT_KB", "CTAS"},
                     .has_89 = true,
                     .knows = FA_IN_BF16 | FA_IN_F32,
                     .rows = quantize_rows,
                     .num_rows = NUM_ROWS(quantize_rows),
                     .chooses = always_chooses},
    [FA_DECODE_SM90] = {.name = "attn_decode_sm90",
                        .files = FILES(DECODE_FILES),
                        .arch = 90,
                        .columns = {DECODE_COLUMNS},
                        .knows = FA_IN_BF16 | FA_FLEX,
                        .rows = decode_sm90_rows,
                        .num_rows = NUM_ROWS(decode_sm90_rows),
                        .chooses = decode_chooses,
                        .takes_mods = true},
    [FA_DECODE_SM80] = {.name = "attn_decode_sm80",
                        .files = FILES(DECODE_FILES),
                        .columns = {DECODE_COLUMNS},
                        .knows = FA_IN_BF16 | FA_FLEX,
                        .rows = decode_sm80_rows,
                        .num_rows = NUM_ROWS(decode_sm80_rows),
                        .chooses = decode_chooses,
                        .takes_mods = true},
};

int fa_variant_shared_bytes(fa_variant v) {
    const int of_row = fa_families[v.family].rows[v.row].shared_bytes;
    if (v.family != FA_FWD_SM80 || !(v.features & FA_CACHE)) return of_row;
    const fa_fwd_sm80_columns *t = fa_fwd_sm80_row(v.row);
    return of_row + FA_PLACE_TILES_SM80(t->stages) * 4 * t->block_kv;
}

bool fa_variant_is_chosen(fa_variant v) {
    if ((int)v.family < 0 || v.family >= FA_NUM_FAMILIES) return false;
    const fa_family *family = &fa_families[v.family];
    const unsigned dtype = v.features & FA_DTYPES, wanted = v.features & ~(unsigned)FA_DTYPES;
    return 0 <= v.row && v.row < family->num_rows && (v.features & ~family->knows) == 0 &&
           (family->arch == 0 || family->arch == v.arch) && (family->rows[v.row].serves & wanted) == wanted &&
           !(wanted & FA_CAUSAL && wanted & FA_LOCAL) && (dtype & (dtype - 1)) == 0 &&
           family->chooses(v.row, v.features);
}

fa_variant fa_plan_variant(const fa_plan *plan, int capability) {
    return (fa_variant){
        (fa_family_id)plan->gpu.family, plan->gpu.row, plan->gpu.features, capability, plan->gpu.mods, NULL};
}

/* Names are written piece by piece, because formatting them would cost a short call a tenth of its time. */
static char *append(const char *name, char *at, const char *text) {
    while (*text && at < name + FA_VARIANT_NAME_BYTES - 1) *at++ = *text++;
    *at = '\0';
    return at;
}

/* Writes a name like attn_fwd_sm90_bf16_d128_q128kv128_causal. The hash of a user's functions stands at the end. */
void fa_variant_name(fa_variant v, char name[FA_VARIANT_NAME_BYTES]) {
    static const struct {
        unsigned bit;
        const char *word;
#define WORD(constant, bit, word) \
    { bit, word }
    } words[] = {FA_FEATURES(WORD)};
#undef WORD
    const fa_family *family = &fa_families[v.family];
    const char *dtype = v.features & FA_IN_E4M3   ? "e4m3"
                        : v.features & FA_IN_F32  ? "fp32"
                        : v.features & FA_IN_BF16 ? "bf16"
                                                  : "fp16";
    char *at = append(name, name, family->name);
    if (family->knows & FA_DTYPES) at = append(name, append(name, at, "_"), dtype);
    at = append(name, at, family->rows[v.row].name + strlen(family->name));
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (v.features & words[i].bit) at = append(name, at, words[i].word);
    if (v.mods_hash != 0) {
        char digits[18] = "_";
        for (int i = 0; i < 16; i++) digits[1 + i] = "0123456789abcdef"[v.mods_hash >> (60 - 4 * i) & 15];
        append(name, at, digits);
    }
}
