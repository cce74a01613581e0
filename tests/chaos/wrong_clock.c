/* A wrong wall clock: MYXO_CLOCK_OFFSET seconds off, and MYXO_CLOCK_RATE times as fast from the
   process's start on. The monotonic clock stays right, as it does when a clock is set. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static int (*right)(clockid_t, struct timespec *);
static double offset, rate = 1, start;

__attribute__((constructor)) static void begin(void)
{
    struct timespec now;
    right = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    right(CLOCK_REALTIME, &now);
    start = now.tv_sec + now.tv_nsec / 1e9;
    if (getenv("MYXO_CLOCK_OFFSET"))
        offset = atof(getenv("MYXO_CLOCK_OFFSET"));
    if (getenv("MYXO_CLOCK_RATE"))
        rate = atof(getenv("MYXO_CLOCK_RATE"));
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    if (!right)
        begin();
    int result = right(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        double passed = now->tv_sec + now->tv_nsec / 1e9 - start;
        double wrong = start + offset + passed * rate;
        now->tv_sec = (time_t)wrong;
        now->tv_nsec = (long)((wrong - (double)now->tv_sec) * 1e9);
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place)
{
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (place)
        *place = exact.tv_sec;
    return exact.tv_sec;
}
