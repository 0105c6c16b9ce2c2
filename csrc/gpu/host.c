/* The one object of host.h. */
#include "host.h"

fa_gpu_host fa_host;
