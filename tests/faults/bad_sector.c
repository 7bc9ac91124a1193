// SPDX-License-Identifier: Apache-2.0
// A disk that cannot read some files: every read of a path that holds $BAD_PATH fails with the number $BAD_ERRNO.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_bad(int descriptor) {
    const char *wanted = getenv("BAD_PATH");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (wanted == NULL || length < 0) return 0;
    path[length] = 0;
    return strstr(path, wanted) != NULL;
}

static ssize_t fail(void) {
    errno = atoi(getenv("BAD_ERRNO"));
    return -1;
}

ssize_t read(int descriptor, void *buffer, size_t count) {
    static ssize_t (*next)(int, void *, size_t);
    if (next == NULL) next = dlsym(RTLD_NEXT, "read");
    return is_bad(descriptor) ? fail() : next(descriptor, buffer, count);
}

ssize_t pread64(int descriptor, void *buffer, size_t count, off_t offset) {
    static ssize_t (*next)(int, void *, size_t, off_t);
    if (next == NULL) next = dlsym(RTLD_NEXT, "pread64");
    return is_bad(descriptor) ? fail() : next(descriptor, buffer, count, offset);
}
