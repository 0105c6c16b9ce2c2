/* Detects the processor, and chooses its table of kernels. */
#define _DEFAULT_SOURCE /* for syscall */
#include "dispatch.h"

#include "reference.h"

#if FA_X86
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

static uint64_t read_xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool has_bits(uint64_t word, uint64_t bits) { return (word & bits) == bits; }
#define BIT(n) (UINT64_C(1) << (n))

/* A process must ask the system for AMX tiles before it uses them. A second request changes nothing. If the system does
 * not know the request, or a sandbox refuses it, the engine does not use AMX. */
static bool may_use_tiles(void) {
#if FA_AMX && defined(__linux__) && defined(SYS_arch_prctl)
    const long request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, and the bit of XCR0 */
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

/* NOTE: the detection reads cpuid and XCR0. The names that __builtin_cpu_supports knows differ between compilers. */
static void detect_isas(bool legal[FA_NUM_ISAS]) {
    uint32_t eax, ebx, ecx, edx, max_subleaf;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !has_bits(ecx, BIT(27))) return; /* bit 27: the system uses XSAVE */
    bool fma_f16c_avx = has_bits(ecx, BIT(12) | BIT(28) | BIT(29));
    uint64_t xcr0 = read_xcr0();
    if (!__get_cpuid_count(7, 0, &max_subleaf, &ebx, &ecx, &edx)) return;
    legal[FA_ISA_AVX2] = fma_f16c_avx && has_bits(ebx, BIT(5)) && has_bits(xcr0, 0x06); /* SSE, AVX state */
    legal[FA_ISA_AVX512] = legal[FA_ISA_AVX2] && has_bits(xcr0, 0xe6) &&                /* masks, 512-bit state */
                           has_bits(ebx, BIT(16) | BIT(17) | BIT(30) | BIT(31));        /* F, DQ, BW, VL */
    const bool has_tiles = has_bits(edx, BIT(22) | BIT(24)) && has_bits(xcr0, 0x60000); /* AMX-BF16, TILE; tile state */
    if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx))
        legal[FA_ISA_AVX512BF16] = legal[FA_ISA_AVX512] && has_bits(eax, BIT(5));
    legal[FA_ISA_AMX] = legal[FA_ISA_AVX512BF16] && has_tiles && may_use_tiles();
}

/* Leaf 4 (Intel) and leaf 0x8000001d (AMD) hold the cache parameters. Each subleaf describes one cache. */
static size_t detect_l2_bytes(void) {
    static const uint32_t leaves[] = {4, 0x8000001d};
    for (int i = 0; i < 2; i++) {
        uint32_t eax, ebx, ecx, edx;
        for (uint32_t subleaf = 0; subleaf < 16; subleaf++) {
            if (!__get_cpuid_count(leaves[i], subleaf, &eax, &ebx, &ecx, &edx) || (eax & 31) == 0) break;
            if ((eax >> 5 & 7) == 2)
                return (size_t)((ebx >> 22) + 1) * ((ebx >> 12 & 1023) + 1) * ((ebx & 4095) + 1) * ((size_t)ecx + 1);
        }
    }
    return 0;
}
#elif FA_NEON
#if defined(__linux__)
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#if defined(__APPLE__)
static uint64_t sysctl_number(const char *name) {
    uint64_t number = 0; /* numbers of 32 bits fill the low half */
    size_t bytes = sizeof number;
    return sysctlbyname(name, &number, &bytes, NULL, 0) == 0 ? number : 0;
}
#endif

/* Advanced SIMD belongs to every 64-bit ARM. BFDOT does not, and a compiler may be too old for it. */
static bool has_bf16(void) {
#if !FA_NEON_BF16
    return false;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return true; /* the whole library is compiled for such processors */
#elif defined(__linux__)
    const unsigned long hwcap2_bf16 = 1ul << 14;
    return (getauxval(AT_HWCAP2) & hwcap2_bf16) != 0;
#elif defined(__APPLE__)
    return sysctl_number("hw.optional.arm.FEAT_BF16") != 0;
#else
    return false;
#endif
}

static void detect_isas(bool legal[FA_NUM_ISAS]) {
    legal[FA_ISA_NEON] = true;
    legal[FA_ISA_NEONBF16] = has_bf16();
}

#if defined(__linux__)
/* Reads what the system says about a cache of the first core. The text is empty if the system says nothing. */
static void read_cache(int idx, const char *what, char *text, int size) {
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", idx, what);
    FILE *file = fopen(path, "re");
    text[0] = '\0';
    if (!file) return;
    if (!fgets(text, size, file)) text[0] = '\0';
    text[strcspn(text, "\n")] = '\0';
    fclose(file);
}

/* The number of bits in a hexadecimal number. */
static size_t count_bits(const char *text) {
    size_t num = 0;
    for (; *text; text++) {
        const char digit[] = {*text, '\0'};
        for (unsigned long bits = strtoul(digit, NULL, 16); bits; bits &= bits - 1) num++;
    }
    return num;
}

/* The system describes each cache of a core in a folder of its own. A size reads like "1024K", and a map of the cores
 * that share the cache like "00000000,0000000f". */
static size_t detect_l2_bytes(void) {
    for (int i = 0; i < 16; i++) {
        char level[16], size[32], cores[512], *unit;
        read_cache(i, "level", level, sizeof level);
        if (strcmp(level, "2") != 0) continue;
        read_cache(i, "size", size, sizeof size);
        read_cache(i, "shared_cpu_map", cores, sizeof cores);
        const size_t number = strtoul(size, &unit, 10), num_cores = count_bits(cores);
        return (*unit == 'M' ? number << 20 : *unit == 'K' ? number << 10 : number) / (num_cores ? num_cores : 1);
    }
    return 0;
}
#elif defined(__APPLE__)
/* About four fast cores share this cache. */
static size_t detect_l2_bytes(void) {
    const uint64_t bytes = sysctl_number("hw.perflevel0.l2cachesize");
    return (size_t)(bytes ? bytes : sysctl_number("hw.l2cachesize")) / 4;
}
#else
static size_t detect_l2_bytes(void) { return 0; }
#endif
#else
static void detect_isas(bool legal[FA_NUM_ISAS]) { (void)legal; }
static size_t detect_l2_bytes(void) { return 0; }
#endif

bool fa_cpu_knows(fa_isa isa) {
#if defined(__x86_64__) || defined(_M_X64)
    const fa_isa first = FA_ISA_AVX2, last = FA_ISA_AMX;
#elif defined(__aarch64__) || defined(_M_ARM64)
    const fa_isa first = FA_ISA_NEON, last = FA_ISA_NEONBF16;
#else
    const fa_isa first = FA_ISA_SCALAR, last = FA_ISA_SCALAR;
#endif
    return isa <= FA_ISA_SCALAR || (first <= isa && isa <= last);
}

void fa_cpu_detect(fa_machine *machine) {
    const size_t default_l2_bytes = 512 * 1024;
    *machine = (fa_machine){.isa_legal = {[FA_ISA_REFERENCE] = true, [FA_ISA_SCALAR] = true}, .threads = 1};
    detect_isas(machine->isa_legal);
    for (int isa = 0; isa < FA_NUM_ISAS; isa++)
        if (machine->isa_legal[isa]) machine->isa = (fa_isa)isa;
    machine->l2_bytes = detect_l2_bytes();
    if (machine->l2_bytes == 0) machine->l2_bytes = default_l2_bytes;
}

const fa_cpu_kernels *fa_cpu_kernels_of(fa_isa isa, fa_dtype dtype) {
    static const fa_cpu_kernels reference = {.fwd = fa_reference_fwd, .bwd = fa_reference_bwd}, none;
    if (isa == FA_ISA_REFERENCE) return &reference;
    if (dtype == FA_F64) return &none;
    if (isa == FA_ISA_SCALAR) return &fa_kernels_scalar;
#if FA_X86
    if (isa == FA_ISA_AVX2) return &fa_kernels_avx2;
    if (isa == FA_ISA_AVX512) return &fa_kernels_avx512;
    if (isa == FA_ISA_AVX512BF16 && dtype == FA_BF16) return &fa_kernels_avx512bf16;
#endif
#if FA_NEON
    if (isa == FA_ISA_NEON) return &fa_kernels_neon;
#endif
#if FA_NEON_BF16
    if (isa == FA_ISA_NEONBF16 && dtype == FA_BF16) return &fa_kernels_neonbf16;
#endif
#if FA_AMX
    if (isa == FA_ISA_AMX && dtype == FA_BF16) return &fa_kernels_amx;
#endif
    return &none;
}
