"A library between Python and the C library that makes reads fail, come short or late, and ends the process at a write. Needs a C compiler on Linux."
import ctypes, os, shutil, subprocess, sys
from pathlib import Path

SOURCE = r'''
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static volatile long every = 0, kind = 0, seen = 0, hit = 0;      /* reads: each `every`-th is 1 EIO, 2 short, 3 late, 4 EINTR */
static volatile long die_at = -1, writes = 0;                     /* writes: the die_at-th call below `where` ends the process */
static char where[4096];

void edge0_reads(long n, long k) { every = n; kind = k; seen = 0; hit = 0; }
long edge0_hits(void) { return hit; }
void edge0_die(long at, const char *dir) { die_at = at; writes = 0; strncpy(where, dir, sizeof where - 1); }
long edge0_writes(void) { return writes; }

static int inside(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0 || !where[0]) return 0;
    path[n] = 0;
    return strncmp(path, where, strlen(where)) == 0;
}
static void write_step(int mine) {
    if (die_at >= 0 && mine && __sync_fetch_and_add(&writes, 1) == die_at) kill(getpid(), SIGKILL);
}
static int fault(void) {
    if (!every || __sync_add_and_fetch(&seen, 1) % every) return 0;
    __sync_add_and_fetch(&hit, 1);
    if (kind == 3) { struct timespec t = {0, 4000000}; nanosleep(&t, 0); return 0; }
    if (kind == 1) errno = EIO;
    if (kind == 4) errno = EINTR;
    return kind;
}
#define READ(name, off, extra, pass) \
ssize_t name(int fd, const struct iovec *v, int n, off at extra) { \
    static ssize_t (*real)(int, const struct iovec *, int, off extra); \
    if (!real) real = dlsym(RTLD_NEXT, #name); \
    int f = fault(); \
    if (f == 1 || f == 4) return -1; \
    if (f == 2) { struct iovec one = v[0]; one.iov_len = one.iov_len > 7 ? 7 : one.iov_len; return real(fd, &one, 1, at pass); } \
    return real(fd, v, n, at pass); }
#define COMMA ,
READ(preadv, off_t, , )
READ(preadv64, off64_t, , )
READ(preadv2, off_t, COMMA int flags, COMMA flags)
READ(preadv64v2, off64_t, COMMA int flags, COMMA flags)

ssize_t write(int fd, const void *b, size_t n) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    if (die_at >= 0 && inside(fd)) {                               /* half of it reaches the file, then the end */
        if (writes == die_at && n > 1) real(fd, b, n/2);
        write_step(1);
    }
    return real(fd, b, n);
}
#define STEP(ret, name, args, call, fd) \
ret name args { static ret (*real) args; if (!real) real = dlsym(RTLD_NEXT, #name); write_step(die_at >= 0 && (fd)); return real call; }
STEP(int, fsync, (int f), (f), inside(f))
STEP(int, ftruncate, (int f, off_t n), (f, n), inside(f))
STEP(int, ftruncate64, (int f, off64_t n), (f, n), inside(f))
STEP(int, rename, (const char *a, const char *b), (a, b), where[0] && !strncmp(b, where, strlen(where)))
STEP(int, unlink, (const char *a), (a), where[0] && !strncmp(a, where, strlen(where)))
'''


def available(): return sys.platform.startswith('linux') and (shutil.which('gcc') or shutil.which('cc')) is not None


def build(folder):
    "The compiled library."
    c, so = Path(folder)/'shim.c', Path(folder)/'shim.so'
    c.write_text(SOURCE)
    subprocess.run([shutil.which('gcc') or shutil.which('cc'), '-O1', '-shared', '-fPIC', '-o', so, c, '-ldl'], check=True, capture_output=True)
    return so


def loaded():
    "In a process that was started with the library before all others."
    lib = ctypes.CDLL(None)
    for name in ('edge0_reads', 'edge0_die'): getattr(lib, name).restype = None
    lib.edge0_reads.argtypes, lib.edge0_die.argtypes = [ctypes.c_long]*2, [ctypes.c_long, ctypes.c_char_p]
    lib.edge0_hits.restype = lib.edge0_writes.restype = ctypes.c_long
    return lib


def python(so, code, **kw):
    "Run code in a fresh process below the library."
    env = os.environ | dict(LD_PRELOAD=str(so), PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), os.environ.get('PYTHONPATH', '')]), OMP_NUM_THREADS='1', MKL_NUM_THREADS='1')
    return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=env, timeout=300, **kw)
