/* The functions of the contract itself: names, sizes and messages. */
#include "flash_attn.h"

#include <stdarg.h>
#include <stdio.h>

const char *fa_isa_name(fa_isa isa) {
#define NAME(id, name) #name
    static const char *const names[FA_NUM_ISAS] = {FA_ISAS(NAME)};
#undef NAME
    return names[isa];
}

bool fa_isa_is_for_bf16(fa_isa isa) { return isa == FA_ISA_NEONBF16 || isa == FA_ISA_AVX512BF16 || isa == FA_ISA_AMX; }

const char *fa_dtype_name(fa_dtype dtype) {
    static const char *const names[] = {
        [FA_F16] = "fp16", [FA_BF16] = "bf16", [FA_F32] = "fp32", [FA_F64] = "fp64", [FA_E4M3] = "e4m3"};
    return names[dtype];
}

size_t fa_dtype_bytes(fa_dtype dtype) {
    static const size_t bytes[] = {[FA_F16] = 2, [FA_BF16] = 2, [FA_F32] = 4, [FA_F64] = 8, [FA_E4M3] = 1};
    return bytes[dtype];
}

fa_dtype fa_output_dtype(fa_dtype dtype) { return dtype == FA_E4M3 ? FA_BF16 : dtype; }

fa_status fa_fail(fa_error *err, fa_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    return status;
}
