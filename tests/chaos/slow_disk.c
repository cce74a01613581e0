/* A slow disk: each write and each flush takes some milliseconds more, now and then the most.
   Preloaded into the server. MYXO_SLOW_DISK_MS is the most. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static void be_slow(void)
{
    static unsigned int state;
    const char *given = getenv("MYXO_SLOW_DISK_MS");
    long most = given ? atol(given) : 0;
    if (most <= 0)
        return;
    if (state == 0)
        state = (unsigned int)getpid();
    long milliseconds = rand_r(&state) % 4 ? most / 20 : rand_r(&state) % most;
    struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    nanosleep(&pause, NULL);
}

#define SLOW(name, parameters, arguments, kind)                          \
    kind name parameters                                                 \
    {                                                                    \
        static kind(*fast) parameters;                                   \
        if (!fast)                                                       \
            fast = (kind(*) parameters)dlsym(RTLD_NEXT, #name);          \
        be_slow();                                                       \
        return fast arguments;                                           \
    }

SLOW(fsync, (int file), (file), int)
SLOW(fdatasync, (int file), (file), int)
SLOW(pwrite, (int file, const void *from, size_t size, off_t place), (file, from, size, place),
     ssize_t)
SLOW(pwrite64, (int file, const void *from, size_t size, off64_t place), (file, from, size, place),
     ssize_t)
SLOW(pwritev, (int file, const struct iovec *from, int count, off_t place),
     (file, from, count, place), ssize_t)
SLOW(pwritev64, (int file, const struct iovec *from, int count, off64_t place),
     (file, from, count, place), ssize_t)
