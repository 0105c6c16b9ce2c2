/* Parameters of quantize. C code fills the struct, and CUDA code reads the struct. All types have the same layout on
 * both sides. */
#ifndef FA_QUANTIZE_PARAMS_H
#define FA_QUANTIZE_PARAMS_H

/* Of a CTA. Four warps measure and write, one warp schedules. A row takes a multiple of 128 bytes of a slot. */
enum {
    FA_QUANTIZE_WARPS = 4,
    FA_QUANTIZE_THREADS = 32 * (4 + 1),
    FA_QUANTIZE_SLOTS = 4,
    FA_QUANTIZE_MOST_ROWS = (24 << 10) / 128 /* of a slot */
};
#define FA_QUANTIZE_SHARED_BYTES(slot_kb) (FA_QUANTIZE_SLOTS * ((slot_kb) << 10) + 2048)

/* One of q, k and v. A row of a sequence and key head is one of its g heads at one position. A piece has
 * piece_rows rows, and the last piece of a sequence has the rest. */
typedef struct {
    const void *x;                            /* [b, row, h, d]; packed: stride_b = 0 */
    long long stride_b, stride_row, stride_h; /* counted in elements */
    unsigned char *out;                       /* contiguous, the shape of x */
    float *descale;                           /* [b, h_kv]; is_per_tensor: one float */
    const int *cu_seqlens;                    /* [b + 1]; NULL: dense */
    int rows;                                 /* dense: of a sequence; packed: of the tensor */
    int g, d, rotates;
    int is_aligned;              /* every row of x consists of aligned pieces of 8 elements */
    int piece_rows, rows_of_warp; /* of a full piece, and of a warp's part of it */
    int units, pitch;   /* of 16 bytes: in the columns of a row, whole chunks of 8; from row to row in shared memory */
    int lines;          /* of 8 units in a row, if the row fills them; otherwise 0 */
    unsigned inverse_g; /* 2^32 / g, rounded up; 0 for the number 1 */
    int pieces_of_head; /* of a sequence and key head, in a dense tensor */
    int num_pieces;     /* some pieces of packed tensors are empty */
} fa_quantize_tensor;

typedef struct {
    fa_quantize_tensor tensors[3];
    int b, h_kv, is_per_tensor;
    int num_pieces;   /* of the three tensors */
    unsigned *ticket; /* the next; begins as 0 */
    unsigned *maxima; /* of the pieces, as the bits of a float, plus 1; begin as 0 */
    unsigned *links;  /* of dropped pieces to those before */
    unsigned long long signs[4];
} fa_quantize_params;

#endif
