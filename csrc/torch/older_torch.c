/* torch before 2.10 has no C functions for threads, and an older one for the address of a tensor's data.
 *
 * Its threads are those of OpenMP: at::parallel_for is a template with `#pragma omp parallel`. GCC makes a call of
 * GOMP_parallel of this pragma, and the OpenMP libraries of GCC and of LLVM have this function. It is looked up in the
 * library that libtorch itself needs. So our work runs on the same threads as torch's own. */
#include "older_torch.h"

#include <string.h>

#include "system/library.h"

#define GET_NUM_THREADS "_ZN2at15get_num_threadsEv"
#define WRAP_A_VALUE    "_Z16THPVariable_WrapN2at10TensorBaseE" /* THPVariable_Wrap(at::TensorBase), until 2.5 */

static struct {
    int (*get_num_threads)(void); /* at::get_num_threads, which also reads the environment at the first call */
    void (*parallel)(void (*fn)(void *), void *data, unsigned num_threads, unsigned flags);
    int (*thread_idx)(void), (*team_size)(void), (*in_parallel)(void);
    void *(*wrap_value)(AtenTensorHandle t);
} older;

static AOTITorchError get_data_ptr(AtenTensorHandle t, const void **data) {
    return fa_torch.aoti_torch_get_data_ptr(t, (void **)data);
}

static AOTITorchError new_tensor_handle(AtenTensorHandle t, AtenTensorHandle *same) {
    return fa_torch.aoti_torch_assign_tensors_out(t, same);
}

/* C++ passes a tensor by the address of a copy, which the function may empty. */
static void *wrap_a_copy(AtenTensorHandle t) {
    AtenTensorHandle copy = NULL;
    if (fa_torch.aoti_torch_new_tensor_handle(t, &copy) != 0) return NULL;
    void *tensor = older.wrap_value(copy);
    fa_torch.aoti_torch_delete_tensor_object(copy);
    return tensor;
}

static AOTITorchError get_num_threads(uint32_t *num_threads) {
    *num_threads = (uint32_t)older.get_num_threads();
    return 0;
}

typedef struct {
    int64_t begin, end, grain_size;
    fa_range_fn *fn;
    void *ctx;
} range;

/* The part of one thread. at::parallel_for cuts a range in the same way. */
static void run_part(void *shared) {
    const range *r = shared;
    const int64_t num = r->end - r->begin, most = (num + r->grain_size - 1) / r->grain_size, team = older.team_size();
    const int64_t parts = most < team ? most : team, size = (num + parts - 1) / parts;
    const int64_t begin = r->begin + older.thread_idx() * size;
    if (begin < r->end) r->fn(begin, begin + size < r->end ? begin + size : r->end, r->ctx);
}

static AOTITorchError parallel_for(int64_t begin, int64_t end, int64_t grain_size, fa_range_fn *fn, void *ctx) {
    range r = {begin, end, grain_size > 0 ? grain_size : 1, fn, ctx};
    if (begin >= end) return 0;
    if (end - begin > r.grain_size && !older.in_parallel() && older.get_num_threads() > 1)
        older.parallel(run_part, &r, 0, 0); /* 0: as many threads as omp_set_num_threads says */
    else
        fn(begin, end, ctx);
    return 0;
}

static fa_status replace_threads(fa_error *err) {
    const struct {
        const char *name;
        void *place;
    } needed[] = {
        {GET_NUM_THREADS, &older.get_num_threads}, {"GOMP_parallel", &older.parallel},
        {"omp_get_thread_num", &older.thread_idx}, {"omp_get_num_threads", &older.team_size},
        {"omp_in_parallel", &older.in_parallel},
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        void *address = fa_torch_symbol(needed[i].name);
        if (!address)
            return fa_fail(err, FA_EUNSUPPORTED,
                           "flash_attn needs PyTorch 2.10 or newer on this platform: the PyTorch that is loaded lacks "
                           "torch_parallel_for (there since 2.10), and %s, which could replace it",
                           needed[i].name);
        memcpy(needed[i].place, &address, sizeof address); /* ISO C has no cast from void * to a function */
    }
    fa_torch.torch_parallel_for = parallel_for;
    fa_torch.torch_get_num_threads = get_num_threads;
    return FA_OK;
}

static void replace_wrap(void) {
    void *library = fa_library_loaded("libtorch_python.so");
    void *address = library ? fa_library_symbol(library, WRAP_A_VALUE) : NULL;
    if (!address) return;
    memcpy(&older.wrap_value, &address, sizeof address);
    fa_torch.wrap = wrap_a_copy;
}

fa_status fa_torch_replace(fa_error *err) {
    if (!fa_torch.torch_get_mutable_data_ptr) fa_torch.torch_get_mutable_data_ptr = fa_torch.aoti_torch_get_data_ptr;
    if (!fa_torch.torch_get_const_data_ptr) fa_torch.torch_get_const_data_ptr = get_data_ptr;
    if (!fa_torch.aoti_torch_new_tensor_handle) fa_torch.aoti_torch_new_tensor_handle = new_tensor_handle;
    if (!fa_torch.wrap) replace_wrap();
    return fa_torch.torch_parallel_for && fa_torch.torch_get_num_threads ? FA_OK : replace_threads(err);
}
