/* The peak of the tile unit of one core, beside peak.c. bench_amx.py compiles this file.
 *
 * peak_tiles keeps four sums in tiles. Each sum is multiplied again as soon as the other three are under way. Nothing
 * touches memory.
 * peak_product computes the same four sums as patches of 32 x 32 scores K Q^T. For each 32 columns it loads two tiles
 * of K and two of Q^T, and at the end of a patch it stores four tiles. All 32 KiB lie in the first-level cache. */
#define _GNU_SOURCE
#pragma GCC target("amx-tile,amx-bf16")
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} config = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* False where the system gives no tiles to this process. */
static int enter(void) {
    if (!__builtin_cpu_supports("avx512f") || syscall(SYS_arch_prctl, 0x1023, 18)) return 0; /* ARCH_REQ_XCOMP_PERM */
    _tile_loadconfig(&config);
    return 1;
}

static double flops_of_steps(size_t steps) { return 4 * 2.0 * 16 * 16 * 32 * (double)steps; }

/* Floating point operations done. */
double peak_tiles(size_t steps) {
    if (!enter()) return 0;
    for (size_t s = 0; s < steps; s++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return flops_of_steps(steps);
}

/* Patches of d / 32 steps; d is 64 or 128. Patches of scores take turns, as those of a block of 128 keys do. */
double peak_product(size_t patches, size_t d) {
    enum { PATCHES = 4, MAX_WORDS = 64 };
    static _Thread_local _Alignas(64) float k[32 * MAX_WORDS], q_t[MAX_WORDS * 32], scores[PATCHES][32 * 32];
    const size_t words = d / 2;
    if (words > MAX_WORDS || !enter()) return 0;
    for (size_t p = 0; p < patches; p++) {
        float *c = scores[p % PATCHES];
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t word = 0; word < words; word += 16) {
            _tile_loadd(4, k + word, (long)(4 * words));
            _tile_loadd(5, k + 16 * words + word, (long)(4 * words));
            _tile_loadd(6, q_t + word * 32, 128);
            _tile_loadd(7, q_t + word * 32 + 16, 128);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c, 128);
        _tile_stored(1, c + 16, 128);
        _tile_stored(2, c + 16 * 32, 128);
        _tile_stored(3, c + 16 * 32 + 16, 128);
    }
    _tile_release();
    return flops_of_steps(patches * words / 16);
}
