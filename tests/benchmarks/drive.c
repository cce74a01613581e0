// Counts the flushes of a process to the drive and makes each take longer.
//
// MYXO_DRIVE_COUNT         a file of eight bytes, shared by all: the number of flushes
// MYXO_DRIVE_MILLISECONDS  how long each flush waits before it does what it should

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static _Atomic int64_t *count;
static struct timespec wait;

__attribute__((constructor)) static void prepare(void) {
    const char *path = getenv("MYXO_DRIVE_COUNT");
    const char *milliseconds = getenv("MYXO_DRIVE_MILLISECONDS");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *page = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        count = page == MAP_FAILED ? NULL : page;
        close(file);
    }
    double seconds = milliseconds ? atof(milliseconds) / 1000 : 0;
    wait.tv_sec = (time_t)seconds;
    wait.tv_nsec = (long)((seconds - (double)wait.tv_sec) * 1e9);
}

static int flush(const char *name, int descriptor) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    if (count) ++*count;
    if (wait.tv_sec || wait.tv_nsec) nanosleep(&wait, NULL);
    return real(descriptor);
}

int fsync(int descriptor) { return flush("fsync", descriptor); }
int fdatasync(int descriptor) { return flush("fdatasync", descriptor); }
