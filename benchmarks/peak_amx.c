/* What the tile unit of one core can do at best, beside peak.c. Compiled by bench_amx.py.
 *
 * Four sums in tiles, each multiplied again as soon as the other three are under way; nothing touches memory. */
#define _GNU_SOURCE
#pragma GCC target("amx-tile,amx-bf16")
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Floating point operations done; 0 where the system gives no tiles to this process. */
double peak_tiles(size_t steps) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    if (!__builtin_cpu_supports("avx512f") || syscall(SYS_arch_prctl, 0x1023, 18)) return 0; /* ARCH_REQ_XCOMP_PERM */
    _tile_loadconfig(&config);
    for (size_t s = 0; s < steps; s++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 4 * 2.0 * 16 * 16 * 32 * (double)steps;
}
