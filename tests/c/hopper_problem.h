/* What check_fwd_sm90.cpp, check_fwd_fp8.cpp and check_bwd_sm90.cpp share: tensors, masks, and the manners of
 * hopper_emulation.h. This is included behind the kernel's text. */
#ifndef HOPPER_PROBLEM_H
#define HOPPER_PROBLEM_H

/* Where each sequence begins among the rows, and the end. */
static std::vector<int> offsets_of(const std::vector<int> &lengths) {
    std::vector<int> offsets = {0};
    for (int len : lengths) offsets.push_back(offsets.back() + len);
    return offsets;
}

/* [rows, h, d]. Elements are NaN before they are drawn. */
template <class type> struct tensor_of {
    int rows, h, d;
    static constexpr long BYTES = sizeof(type);
    std::vector<type> data;
    emulated_map map;

    tensor_of(int rows, int h, int d)
        : rows(rows), h(h), d(d), data((size_t)(rows * h * d), type{(decltype(type::bits))0x7fff}) {}
    void draw(float scale = 1) {
        std::normal_distribution<float> normal;
        for (type &x : data) x = cvt<type>(scale * normal(random_bits));
    }
    type *row(int i, int head) { return &data[(size_t)((i * h + head) * d)]; }
    double at(int i, int head, int column) { return cvt_f32(row(i, head)[column]); }
    /* len: of each sequence, if they are not packed. */
    void fill_map(fa_tensor_map &to, int len, int box_rows, int box_heads = 1, int box_row_bytes = ROW_BYTES) {
        const long row_bytes = BYTES * h * d;
        char *start = (char *)data.data();
        if (VARLEN) /* tensor_map.h says why */
            map = {start - rows * row_bytes,
                   row_bytes,
                   BYTES * d,
                   row_bytes,
                   d,
                   rows,
                   h,
                   rows + 1,
                   box_rows,
                   box_row_bytes};
        else
            map = {start,    row_bytes,    BYTES * d, len * row_bytes, d, len, h, len ? rows / len : 0,
                   box_rows, box_row_bytes};
        map.box_heads = box_heads, map.element_bytes = (int)BYTES;
        const emulated_map *place = &map;
        memcpy(to.words, &place, sizeof place);
    }
    /* Of a cache, whose keys are dense beside packed queries, too. */
    void fill_map_of_pages(fa_tensor_map &to, int page_size, int box_rows) {
        const long row_bytes = BYTES * h * d;
        map = {(char *)data.data(), row_bytes, BYTES * d, page_size * row_bytes, d, page_size, h,
               rows / page_size,    box_rows,  ROW_BYTES};
        const emulated_map *place = &map;
        memcpy(to.words, &place, sizeof place);
    }
};

typedef tensor_of<element> tensor;

/* The keys of a cache that are loaded whole, with room of `apart` keys between pages, which holds NaN. */
struct pages_apart {
    std::vector<element> data;

    void move(tensor &t, int page_size, int apart) {
        const int num_pages = t.rows / page_size, far = page_size + apart;
        const size_t row = (size_t)(t.h * t.d), of_page = (size_t)page_size * row;
        data.assign((size_t)((num_pages - 1) * far + page_size) * row, element{0x7fff});
        for (int n = 0; n < num_pages; n++)
            std::copy_n(&t.data[(size_t)n * of_page], of_page, &data[(size_t)(n * far) * row]);
        t.map.data = (char *)data.data(), t.map.rows = (int)(data.size() / row) / 8, t.map.box_rows /= 8;
        t.map.sequences = num_pages * far / 8;
    }
};

/* The elements of a tensor in double. */
struct numbers {
    int h, d;
    std::vector<double> data;

    template <class type> explicit numbers(const tensor_of<type> &t) : h(t.h), d(t.d) {
        data.reserve(t.data.size());
        for (type x : t.data) data.push_back(cvt_f32(x));
    }
    const double *row(int i, int head) const { return &data[(size_t)((i * h + head) * d)]; }
};

typedef double two_numbers __attribute__((vector_size(16)));
static two_numbers two_at(const double *from) {
    two_numbers x;
    memcpy(&x, from, sizeof x);
    return x;
}
/* Rows have a multiple of 8 elements. */
static double dot(const double *x, const double *y, int num) {
    two_numbers sums[4] = {};
    for (int i = 0; i < num; i += 8)
        for (int k = 0; k < 4; k++) sums[k] += two_at(x + i + 2 * k) * two_at(y + i + 2 * k);
    sums[0] += sums[1] + sums[2] + sums[3];
    return sums[0][0] + sums[0][1];
}
static void add_multiple(double *to, double factor, const double *row, int num) {
    for (int i = 0; i < num; i += 2) {
        const two_numbers sum = two_at(to + i) + factor * two_at(row + i);
        memcpy(to + i, &sum, sizeof sum);
    }
}

/* The keys that query row i of a sequence sees. */
constexpr int WINDOW_LEFT = LOCAL ? 150 : -1, WINDOW_RIGHT = CAUSAL ? 0 : LOCAL ? 20 : -1;
struct key_range {
    int begin, end;
};
static key_range keys_of_row(int i, int len_q, int len_kv) {
    const int at = i + len_kv - len_q; /* the key on the diagonal */
    return {WINDOW_LEFT < 0 ? 0 : max(at - WINDOW_LEFT, 0),
            WINDOW_RIGHT < 0 ? len_kv : min(at + WINDOW_RIGHT + 1, len_kv)};
}

/* Draws the manner of a problem in round n. Slow is one of the first num_warps warps, one of num_groups warpgroups from
 * first_group on, or none. */
static void draw_manner(int n, int num_warps, int first_group, int num_groups) {
    static const unsigned paces[] = {4, 100, 1500};
    const int slow = (int)(random_bits() % (unsigned)(num_groups + num_warps + 1)) - num_groups;
    manner = {n % 3 != 1, n % 3 == 2, paces[random_bits() % 3], slow >= 0 && slow < num_warps ? slow : -1,
              slow < 0 ? first_group + num_groups + slow : -1};
}
static void print_manner() {
    fprintf(stderr, " (late products %d, immediate copies %d, pace %u, slow warp %d, slow warpgroup %d)\n",
            manner.products_are_late, manner.copies_are_immediate, manner.copy_pace, manner.slow_warp,
            manner.slow_group);
}

/* Runs each problem in each round: `check_... [SEED [ROUNDS]]`. */
template <int N, class problem>
static void check_all(int argc, char **argv, const problem (&problems)[N], int num_warps, int first_group,
                      int num_groups, void (*check)(const problem &)) {
    if (argc > 1) random_bits.seed((unsigned)atoi(argv[1]));
    for (int n = 0; n < (argc > 2 ? atoi(argv[2]) : 3); n++)
        for (const problem &x : problems) {
            draw_manner(n, num_warps, first_group, num_groups);
            check(x);
        }
}

#endif
