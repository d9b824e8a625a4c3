"""Take from this process all that a computation does not need. It cannot be undone.

seccomp (through libseccomp) lets it make the system calls of `_ALLOWED` and no others; Landlock
lets it open the files of the standard library and no others.
"""

import ctypes
import errno
import os
import resource
import signal
import sys
import sysconfig

_ALLOWED = """
    read readv pread64 preadv lseek write writev close fstat newfstatat stat lstat statx access
    faccessat faccessat2 readlink readlinkat getdents64 getcwd pipe pipe2 dup poll ppoll select
    pselect6 mmap munmap mremap mprotect brk madvise futex sched_yield sched_getaffinity
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall nanosleep clock_nanosleep
    clock_gettime clock_getres gettimeofday time times getrusage getpid getppid gettid getuid
    geteuid getgid getegid uname sysinfo getrandom rseq set_robust_list exit exit_group
"""

# libseccomp
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EQUAL, _MASKED_EQUAL = 4, 7
_O_TMPFILE = 0o20000000  # without O_DIRECTORY, which os.O_TMPFILE has in it
_WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND | _O_TMPFILE
# Close on exec, is it a terminal; duplicate, flags. Not: send signals, lock files, limit others.
_IOCTLS = (0x5401, 0x5450, 0x5451)
_FCNTLS = (0, 1, 2, 3, 4, 1030)

# Landlock: all rights over files that each version of its interface knows.
_FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_NO_NEW_PRIVS, _PARENT_DEATH_SIGNAL = 38, 1


class ConfineError(Exception):
    """The kernel or a library that is needed is not here."""


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_uint),
        ("mask_or_value", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def limit(*, cpu_s: int, memory_mb: int) -> None:
    """Bound CPU time (a second more until the kernel kills) and address space; write no files."""
    memory = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def confine() -> bool:
    """Allow this process to compute, to read the standard library, and to use its open pipes.

    Returns:
        Whether other files are unreadable: it takes Landlock, of Linux 5.13.

    Raises:
        ConfineError: there is no seccomp. Nothing is confined then.
    """
    if sys.platform != "linux":
        raise ConfineError(f"wanted Linux, got {sys.platform}; use a container")
    try:
        seccomp = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError as error:
        raise ConfineError(f"{error}: install libseccomp (Debian: libseccomp2)") from error
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise ConfineError(f"no_new_privs: {os.strerror(ctypes.get_errno())}")
    hides_files = _allow_reading_only(libc, _library_paths())
    _allow_calls_only(seccomp)
    return hides_files


def _library_paths() -> list[str]:
    """Where the standard library, and the shared objects that it loads, may lie."""
    folders = [path for path in sys.path if path]
    folders += [str(sysconfig.get_config_var("LIBDIR")), "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    folders += ["/usr/local/lib", "/nix/store", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    return [path for path in folders if os.path.exists(path)]


def _allow_reading_only(libc: ctypes.CDLL, paths: list[str]) -> bool:
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = ctypes.c_uint64(_FILE_RIGHTS.get(version, 0xFFFF))
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rights), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    for path in paths:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _PathRule(_READ_FILE | (_READ_DIR if os.path.isdir(path) else 0), folder)
        failed = libc.syscall(_ADD_RULE, ruleset, 1, ctypes.byref(rule), 0)
        os.close(folder)
        if failed:
            raise ConfineError(f"Landlock: {path}: {os.strerror(ctypes.get_errno())}")
    failed = libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    if failed:
        raise ConfineError(f"Landlock: {os.strerror(ctypes.get_errno())}")
    return True


def _allow_calls_only(seccomp: ctypes.CDLL) -> None:
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(_ERRNO | errno.EPERM))
    if not rules:
        raise ConfineError("seccomp: out of memory")

    def allow(name: str, *comparisons: _Comparison) -> None:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number == -1:  # this processor has no such call
            return
        array = (_Comparison * max(1, len(comparisons)))(*comparisons)
        failed = seccomp.seccomp_rule_add_array(rules, _ALLOW, number, len(comparisons), array)
        if failed and number >= 0:
            raise ConfineError(f"seccomp: {name}: {os.strerror(-failed)}")

    for name in _ALLOWED.split():
        allow(name)
    allow("open", _Comparison(1, _MASKED_EQUAL, _WRITES, 0))
    allow("openat", _Comparison(2, _MASKED_EQUAL, _WRITES, 0))
    allow("prlimit64", _Comparison(0, _EQUAL, 0, 0), _Comparison(2, _EQUAL, 0, 0))
    for command in _IOCTLS:
        allow("ioctl", _Comparison(1, _MASKED_EQUAL, 0xFFFFFFFF, command))
    for command in _FCNTLS:
        allow("fcntl", _Comparison(1, _MASKED_EQUAL, 0xFFFFFFFF, command))
    failed = seccomp.seccomp_load(rules)
    seccomp.seccomp_release(rules)
    if failed:
        raise ConfineError(f"seccomp: {os.strerror(-failed)}")
