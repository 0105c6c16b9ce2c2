/* State of several threads: a lock that needs no set-up, for what they find or make on first use; and what each has for
 * itself. */
#ifndef FA_SYSTEM_LOCK_H
#define FA_SYSTEM_LOCK_H

#if defined(_WIN32)
#include <windows.h>
typedef SRWLOCK fa_lock;
#define FA_LOCK_INIT SRWLOCK_INIT
static inline void fa_lock_acquire(fa_lock *lock) { AcquireSRWLockExclusive(lock); }
static inline void fa_lock_release(fa_lock *lock) { ReleaseSRWLockExclusive(lock); }
#else
#include <pthread.h>
typedef pthread_mutex_t fa_lock;
#define FA_LOCK_INIT PTHREAD_MUTEX_INITIALIZER
static inline void fa_lock_acquire(fa_lock *lock) { pthread_mutex_lock(lock); }
static inline void fa_lock_release(fa_lock *lock) { pthread_mutex_unlock(lock); }
#endif

#if defined(_MSC_VER)
#define THREAD_LOCAL __declspec(thread)
#else
#define THREAD_LOCAL _Thread_local
#endif

#endif
