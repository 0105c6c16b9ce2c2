/* The rate at which this machine reads memory. This rate bounds a decode, which reads its cache once. bench_cpu.py
 * compiles this file with -O3 -march=native. The loop reads one ascending stream with one addition a vector. The
 * processor's own prefetch does the rest. */
#include <stddef.h>
#include <stdint.h>

/* bytes is a multiple of 256. */
uint64_t read_all(const uint64_t *data, size_t bytes) {
    uint64_t sum[32] = {0}, total = 0;
    for (const uint64_t *p = data; p < data + bytes / 8; p += 32)
        for (int i = 0; i < 32; i++) sum[i] += p[i];
    for (int i = 0; i < 32; i++) total += sum[i];
    return total;
}
