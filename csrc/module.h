/* What the ops share with the Python module around them: the machine as the user lowered it, and recorded plans. */
#ifndef FA_MODULE_H
#define FA_MODULE_H

#include "flash_attn.h"

/* ops.c: defines the ops of namespace flash_attn and implements them for CPU and CUDA tensors. Once per process. */
fa_status fa_register_ops(fa_error *err);

/* ops.c: the machine that plans are made for; the thread count is torch's at the time of the call. */
extern fa_machine fa_this_machine;

/* module.c: is this thread only collecting plans (nothing may run, no seed may be drawn)? */
bool fa_plan_only(void);

/* module.c: an op of this thread has failed, or (FA_OK) begins; the dispatcher will tell Python no more than the text. */
void fa_note_failure(fa_status status, const fa_error *err);

/* module.c: FLASH_ATTN_CHECK=1. */
extern bool fa_checks_values_on_gpu;

/* module.c: keeps a plan for take_plans() while collecting, prints it if FLASH_ATTN_LOG=plan. */
void fa_note_plan(const fa_plan *plan);

#endif
