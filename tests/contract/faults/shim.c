/* A preload library that makes file operations fail on purpose.
 *
 * Every operation that changes something on a path containing a given text is numbered, over all
 * threads, and optionally logged.  One number can be chosen at which the process is killed, a write
 * is cut in half, or the operation fails.  Counting starts when the shim is armed: by the child
 * itself (fault_arm), or from the start (FAULT_ARMED=1), so that set-up work is not counted.
 *
 *   FAULT_PATH    only paths that contain this text count (required)
 *   FAULT_OPS     comma separated names of the operations that count; all when empty
 *   FAULT_ACTION  log | kill | torn | eio | enospc | short
 *   FAULT_NTH     the number at which the action happens, from 1
 *   FAULT_LOG     a file that gets one line per counted operation: number, name, bytes to write, path
 *
 * kill: the process dies before operation N.  torn: half of write N reaches the file, then it dies.
 * eio: operation N fails once.  enospc: from N on, everything that takes up room fails, while
 * deleting and renaming still work, as on a full disk.  short: from N on every write is cut short
 * and says so, which is legal and which a careless caller overlooks.
 *
 * Apart from that, fault_refuse_exchange(1) makes renameat2 answer as on a file system that cannot
 * swap two names.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum action { LOG, KILL, TORN, FAIL_ONCE, NO_ROOM, SHORT };
enum verdict { PASS = 0, FAIL = 1, HALF_THEN_DIE = 2, HALF = 3 };

static struct {
  char path[PATH_MAX];
  char ops[256];
  enum action action;
  long nth;
  int log_fd;
} config = {.log_fd = -1};

static atomic_int armed;
static atomic_long counted;
static __thread size_t writing; /* bytes of the write that is judged */
static atomic_long struck; /* number of the first operation that was made to fail, 0 for none */

/* The log is written by the real call, or it would be counted itself. */
static long real_syscall(long number, long a, long b, long c, long d) {
  static long (*real)(long, ...);
  if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return real(number, a, b, c, d);
}

/* ---- set-up ---------------------------------------------------------------------------------- */

static enum action action_of(const char *name) {
  if (!name || !*name || !strcmp(name, "log")) return LOG;
  if (!strcmp(name, "kill")) return KILL;
  if (!strcmp(name, "torn")) return TORN;
  if (!strcmp(name, "eio")) return FAIL_ONCE;
  if (!strcmp(name, "enospc")) return NO_ROOM;
  if (!strcmp(name, "short")) return SHORT;
  fprintf(stderr, "shim: unknown action %s\n", name);
  abort();
}

/* Called by a forked child, which cannot be configured through its environment. */
void fault_configure(const char *path, const char *ops, const char *action, long nth,
                     const char *log) {
  atomic_store(&armed, 0);
  atomic_store(&counted, 0);
  atomic_store(&struck, 0);
  snprintf(config.path, sizeof config.path, "%s", path ? path : "");
  snprintf(config.ops, sizeof config.ops, "%s", ops ? ops : "");
  config.action = action_of(action);
  config.nth = nth;
  config.log_fd = -1;
  if (log && *log)
    config.log_fd = (int)real_syscall(SYS_openat, AT_FDCWD, (long)log,
                                      O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

static atomic_int exchange_refused;
void fault_refuse_exchange(int refuse) { atomic_store(&exchange_refused, refuse); }

void fault_arm(void) { atomic_store(&armed, 1); }
void fault_disarm(void) { atomic_store(&armed, 0); }
long fault_counted(void) { return atomic_load(&counted); }
long fault_struck(void) { return atomic_load(&struck); }

__attribute__((constructor)) static void from_environment(void) {
  const char *path = getenv("FAULT_PATH");
  if (!path || !*path) return;
  const char *nth = getenv("FAULT_NTH");
  fault_configure(path, getenv("FAULT_OPS"), getenv("FAULT_ACTION"), nth ? atol(nth) : 0,
                  getenv("FAULT_LOG"));
  if (getenv("FAULT_ARMED")) fault_arm();
}

/* ---- deciding -------------------------------------------------------------------------------- */

static int is_listed(const char *op) {
  size_t n = strlen(op);
  if (!config.ops[0]) return 1;
  for (const char *at = config.ops; (at = strstr(at, op)); at += n)
    if ((at == config.ops || at[-1] == ',') && (at[n] == ',' || !at[n])) return 1;
  return 0;
}

static int takes_room(const char *op) {
  return strcmp(op, "unlink") && strcmp(op, "rmdir") && strcmp(op, "rename");
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

/* What is to happen to this operation.  Everything is decided by the number that it draws here. */
static enum verdict judge(const char *op, const char *path) {
  if (!atomic_load(&armed) || !config.path[0] || !strstr(path, config.path) || !is_listed(op))
    return PASS;
  long number = atomic_fetch_add(&counted, 1) + 1;
  if (config.log_fd >= 0) {
    char line[2 * PATH_MAX + 64];
    int n = snprintf(line, sizeof line, "%ld %s %zu %s\n", number, op, writing, path);
    if (n > (int)sizeof line) n = sizeof line;
    real_syscall(SYS_write, config.log_fd, (long)line, n, 0);
  }
  if (config.action == LOG || number < config.nth) return PASS;
  int is_it = number == config.nth;
  long none = 0;
  switch (config.action) {
    case KILL:
      if (is_it) die();
      return PASS;
    case TORN:
      if (!is_it) return PASS;
      if (!strcmp(op, "write")) return HALF_THEN_DIE;
      die();
      return PASS;
    case FAIL_ONCE:
      if (!is_it) return PASS;
      atomic_compare_exchange_strong(&struck, &none, number);
      errno = EIO;
      return FAIL;
    case NO_ROOM:
      if (!takes_room(op)) return PASS;
      atomic_compare_exchange_strong(&struck, &none, number);
      errno = ENOSPC;
      return FAIL;
    case SHORT:
      if (strcmp(op, "write")) return PASS;
      atomic_compare_exchange_strong(&struck, &none, number);
      return HALF;
    default:
      return PASS;
  }
}

static const char *path_of_fd(int fd, char *out) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, out, PATH_MAX - 1);
  out[n < 0 ? 0 : n] = 0;
  return out;
}

static const char *path_at(int dirfd, const char *path, char *out) {
  char base[PATH_MAX];
  if (!path) path = "";
  if (path[0] == '/') {
    snprintf(out, PATH_MAX, "%s", path);
    return out;
  }
  if (dirfd == AT_FDCWD) {
    if (!getcwd(base, sizeof base)) base[0] = 0;
  } else {
    path_of_fd(dirfd, base);
  }
  snprintf(out, PATH_MAX, "%.*s/%.*s", PATH_MAX / 2 - 1, base, PATH_MAX / 2 - 1, path);
  return out;
}

static enum verdict judge_fd(const char *op, int fd) {
  char path[PATH_MAX];
  return atomic_load(&armed) ? judge(op, path_of_fd(fd, path)) : PASS;
}

static enum verdict judge_at(const char *op, int dirfd, const char *name) {
  char path[PATH_MAX];
  return atomic_load(&armed) ? judge(op, path_at(dirfd, name, path)) : PASS;
}

static enum verdict judge_two(const char *op, int fd1, const char *name1, int fd2,
                              const char *name2) {
  char one[PATH_MAX], two[PATH_MAX], both[2 * PATH_MAX + 8];
  if (!atomic_load(&armed)) return PASS;
  snprintf(both, sizeof both, "%s -> %s", path_at(fd1, name1, one), path_at(fd2, name2, two));
  return judge(op, both);
}

#define NEXT(name, type)         \
  static __typeof__(type) *next; \
  if (!next) next = (__typeof__(type) *)dlsym(RTLD_NEXT, name)

/* ---- creating files -------------------------------------------------------------------------- */

static mode_t mode_of(int flags, va_list rest) {
  return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? (mode_t)va_arg(rest, int) : 0;
}

static int changes(int flags) {
  return (flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE;
}

#define OPEN(symbol)                                                             \
  int symbol(const char *path, int flags, ...) {                                 \
    NEXT(#symbol, int(const char *, int, ...));                              \
    va_list rest;                                                                \
    va_start(rest, flags);                                                       \
    mode_t mode = mode_of(flags, rest);                                          \
    va_end(rest);                                                                \
    if (changes(flags) && judge_at("open", AT_FDCWD, path) == FAIL) return -1;   \
    return next(path, flags, mode);                                              \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(symbol)                                                           \
  int symbol(int dirfd, const char *path, int flags, ...) {                      \
    NEXT(#symbol, int(int, const char *, int, ...));                         \
    va_list rest;                                                                \
    va_start(rest, flags);                                                       \
    mode_t mode = mode_of(flags, rest);                                          \
    va_end(rest);                                                                \
    if (changes(flags) && judge_at("open", dirfd, path) == FAIL) return -1;      \
    return next(dirfd, path, flags, mode);                                       \
  }
OPENAT(openat)
OPENAT(openat64)

#define CREAT(symbol)                                                            \
  int symbol(const char *path, mode_t mode) {                                    \
    NEXT(#symbol, int(const char *, mode_t));                                \
    if (judge_at("open", AT_FDCWD, path) == FAIL) return -1;                     \
    return next(path, mode);                                                     \
  }
CREAT(creat)
CREAT(creat64)

/* ---- writing --------------------------------------------------------------------------------- */

static size_t total(const struct iovec *v, int count) {
  size_t n = 0;
  while (count--) n += v++->iov_len;
  return n;
}

static size_t half(size_t n) { return n > 1 ? n / 2 : n; }

/* Cuts a vector to half of its bytes, at least one; the copy lives in `out`. */
static int halve(const struct iovec *in, int count, struct iovec *out) {
  size_t left = half(total(in, count));
  int n = 0;
  for (; n < count && left; n++) {
    out[n] = in[n];
    if (out[n].iov_len > left) out[n].iov_len = left;
    left -= out[n].iov_len;
  }
  return n;
}

static enum verdict judge_write(int fd, size_t n) {
  writing = n;
  enum verdict verdict = judge_fd("write", fd);
  writing = 0;
  return verdict;
}

#define AS_JUDGED(fd, n, whole, part)       \
  switch (judge_write(fd, n)) {             \
    case FAIL:                              \
      return -1;                            \
    case HALF_THEN_DIE:                     \
      (void)!(part);                        \
      die();                                \
      return -1;                            \
    case HALF:                              \
      return part;                          \
    default:                                \
      return whole;                         \
  }

ssize_t write(int fd, const void *data, size_t n) {
  NEXT("write", ssize_t(int, const void *, size_t));
  AS_JUDGED(fd, n, next(fd, data, n), next(fd, data, half(n)))
}

#define PWRITE(symbol, off)                                                      \
  ssize_t symbol(int fd, const void *data, size_t n, off at) {                   \
    NEXT(#symbol, ssize_t(int, const void *, size_t, off));                   \
    AS_JUDGED(fd, n, next(fd, data, n, at), next(fd, data, half(n), at))            \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec *v, int count) {
  NEXT("writev", ssize_t(int, const struct iovec *, int));
  struct iovec cut[IOV_MAX];
  AS_JUDGED(fd, total(v, count), next(fd, v, count), next(fd, cut, halve(v, count, cut)))
}

#define PWRITEV(symbol, off)                                                     \
  ssize_t symbol(int fd, const struct iovec *v, int count, off at) {             \
    NEXT(#symbol, ssize_t(int, const struct iovec *, int, off));              \
    struct iovec cut[IOV_MAX];                                                   \
    AS_JUDGED(fd, total(v, count), next(fd, v, count, at), next(fd, cut, halve(v, count, cut), at)) \
  }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

#define PWRITEV2(symbol, off)                                                    \
  ssize_t symbol(int fd, const struct iovec *v, int count, off at, int flags) {  \
    NEXT(#symbol, ssize_t(int, const struct iovec *, int, off, int));         \
    struct iovec cut[IOV_MAX];                                                   \
    AS_JUDGED(fd, total(v, count), next(fd, v, count, at, flags),                                 \
              next(fd, cut, halve(v, count, cut), at, flags))                    \
  }
PWRITEV2(pwritev2, off_t)
PWRITEV2(pwritev64v2, off64_t)

#define SENDFILE(symbol, off)                                                    \
  ssize_t symbol(int out, int in, off *at, size_t n) {                           \
    NEXT(#symbol, ssize_t(int, int, off *, size_t));                          \
    AS_JUDGED(out, n, next(out, in, at, n), next(out, in, at, half(n)))             \
  }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t n, unsigned flags) {
  NEXT("copy_file_range", ssize_t(int, off64_t *, int, off64_t *, size_t, unsigned));
  AS_JUDGED(out, n, next(in, from, out, to, n, flags), next(in, from, out, to, half(n), flags))
}

/* ---- sizes and syncing ----------------------------------------------------------------------- */

#define ON_FD(op, symbol, params, ...)                                           \
  int symbol params {                                                            \
    NEXT(#symbol, int params);                                                \
    if (judge_fd(op, fd) == FAIL) return -1;                                     \
    return next(__VA_ARGS__);                                                    \
  }
ON_FD("fsync", fsync, (int fd), fd)
ON_FD("fsync", fdatasync, (int fd), fd)
ON_FD("fsync", syncfs, (int fd), fd)
ON_FD("truncate", ftruncate, (int fd, off_t n), fd, n)
ON_FD("truncate", ftruncate64, (int fd, off64_t n), fd, n)
ON_FD("truncate", fallocate, (int fd, int mode, off_t at, off_t n), fd, mode, at, n)
ON_FD("truncate", fallocate64, (int fd, int mode, off64_t at, off64_t n), fd, mode, at, n)

/* posix_fallocate returns its error and leaves errno alone. */
#define POSIX_FALLOCATE(symbol, off)                                             \
  int symbol(int fd, off at, off n) {                                            \
    NEXT(#symbol, int(int, off, off));                                       \
    if (judge_fd("truncate", fd) == FAIL) return errno;                          \
    return next(fd, at, n);                                                      \
  }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

/* ---- names ----------------------------------------------------------------------------------- */

#define ON_NAME(op, symbol, params, dirfd, name, ...)                            \
  int symbol params {                                                            \
    NEXT(#symbol, int params);                                                \
    if (judge_at(op, dirfd, name) == FAIL) return -1;                            \
    return next(__VA_ARGS__);                                                    \
  }
ON_NAME("truncate", truncate, (const char *p, off_t n), AT_FDCWD, p, p, n)
ON_NAME("truncate", truncate64, (const char *p, off64_t n), AT_FDCWD, p, p, n)
ON_NAME("mkdir", mkdir, (const char *p, mode_t m), AT_FDCWD, p, p, m)
ON_NAME("mkdir", mkdirat, (int d, const char *p, mode_t m), d, p, d, p, m)
ON_NAME("rmdir", rmdir, (const char *p), AT_FDCWD, p, p)
ON_NAME("unlink", unlink, (const char *p), AT_FDCWD, p, p)
ON_NAME("link", symlink, (const char *to, const char *p), AT_FDCWD, p, to, p)
ON_NAME("link", symlinkat, (const char *to, int d, const char *p), d, p, to, d, p)

int unlinkat(int d, const char *p, int flags) {
  NEXT("unlinkat", int(int, const char *, int));
  if (judge_at(flags & AT_REMOVEDIR ? "rmdir" : "unlink", d, p) == FAIL) return -1;
  return next(d, p, flags);
}

int remove(const char *p) { /* libc's own calls the syscalls directly, so it is spelt out */
  int rc = unlink(p);
  return rc && errno == EISDIR ? rmdir(p) : rc;
}

#define ON_TWO(op, symbol, params, d1, p1, d2, p2, ...)                          \
  int symbol params {                                                            \
    NEXT(#symbol, int params);                                                \
    if (judge_two(op, d1, p1, d2, p2) == FAIL) return -1;                        \
    return next(__VA_ARGS__);                                                    \
  }
ON_TWO("rename", rename, (const char *a, const char *b), AT_FDCWD, a, AT_FDCWD, b, a, b)
ON_TWO("rename", renameat, (int d, const char *a, int e, const char *b), d, a, e, b, d, a, e, b)

#define EXCHANGE_FLAG 2u /* RENAME_EXCHANGE, of a header that older systems lack */

static int is_refused(unsigned flags) {
  if (!(flags & EXCHANGE_FLAG) || !atomic_load(&exchange_refused)) return 0;
  errno = EINVAL;
  return 1;
}

int renameat2(int d, const char *a, int e, const char *b, unsigned f) {
  NEXT("renameat2", int(int, const char *, int, const char *, unsigned));
  if (is_refused(f) || judge_two("rename", d, a, e, b) == FAIL) return -1;
  return next(d, a, e, b, f);
}

ON_TWO("link", link, (const char *a, const char *b), AT_FDCWD, a, AT_FDCWD, b, a, b)
ON_TWO("link", linkat, (int d, const char *a, int e, const char *b, int f), d, a, e, b, d, a, e, b,
       f)

/* ---- the back door: syscall(2), by which renameat2 is called where libc lacks it -------------- */

long syscall(long number, ...) {
  NEXT("syscall", long(long, ...));
  long a[6];
  va_list rest;
  va_start(rest, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
  va_end(rest);
  enum verdict verdict = PASS;
  switch (number) {
    case SYS_openat:
      if (changes((int)a[2])) verdict = judge_at("open", (int)a[0], (const char *)a[1]);
      break;
    case SYS_write:
    case SYS_pwrite64:
    case SYS_writev:
      verdict = judge_write((int)a[0], number == SYS_writev ? 0 : (size_t)a[2]);
      break;
    case SYS_fsync:
    case SYS_fdatasync:
      verdict = judge_fd("fsync", (int)a[0]);
      break;
    case SYS_ftruncate:
    case SYS_fallocate:
      verdict = judge_fd("truncate", (int)a[0]);
      break;
    case SYS_mkdirat:
      verdict = judge_at("mkdir", (int)a[0], (const char *)a[1]);
      break;
    case SYS_unlinkat:
      verdict = judge_at((int)a[2] & AT_REMOVEDIR ? "rmdir" : "unlink", (int)a[0],
                         (const char *)a[1]);
      break;
#ifdef SYS_rename
    case SYS_rename:
      verdict = judge_two("rename", AT_FDCWD, (const char *)a[0], AT_FDCWD, (const char *)a[1]);
      break;
#endif
    case SYS_renameat2:
      if (is_refused((unsigned)a[4])) return -1;
      /* fall through */
    case SYS_renameat:
      verdict = judge_two("rename", (int)a[0], (const char *)a[1], (int)a[2], (const char *)a[3]);
      break;
    case SYS_linkat:
      verdict = judge_two("link", (int)a[0], (const char *)a[1], (int)a[2], (const char *)a[3]);
      break;
    default:
      break;
  }
  if (verdict == FAIL) return -1;
  if (verdict == HALF_THEN_DIE) die();
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
