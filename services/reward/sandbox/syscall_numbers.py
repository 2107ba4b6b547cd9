"""Numbers of the system calls that a program may use, on x86_64 and aarch64 (None: it does not exist there).

The tables are from the kernel's unistd headers; the rules are in seccomp.py.
"""

from __future__ import annotations

Numbers = dict[str, tuple[int | None, int | None]]

# fmt: off
READING: Numbers = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, None), "pipe": (22, None),
    "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216), "msync": (26, 227), "mincore": (27, 232),
    "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "pause": (34, None), "nanosleep": (35, 101),
    "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172), "sendfile": (40, 71),
    "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "socketpair": (53, 199), "setsockopt": (54, 208),
    "getsockopt": (55, 209), "exit": (60, 93), "wait4": (61, 260), "uname": (63, 160), "fcntl": (72, 25),
    "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83), "getdents": (78, None), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50), "readlink": (89, None), "umask": (95, 166), "gettimeofday": (96, 169),
    "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "getpgrp": (111, None),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150), "getpgid": (121, 155),
    "getsid": (124, 156), "capget": (125, 90), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "statfs": (137, 43), "fstatfs": (138, 44),
    "getpriority": (140, 141), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "sched_rr_get_interval": (148, 127),
    "munlock": (150, 229), "munlockall": (152, 231), "arch_prctl": (158, None), "setrlimit": (160, 164),
    "gettid": (186, 178), "time": (201, None), "futex": (202, 98), "sched_getaffinity": (204, 123),
    "epoll_create": (213, None), "getdents64": (217, 61), "set_tid_address": (218, 96), "restart_syscall": (219, 128),
    "fadvise64": (221, 223), "timer_create": (222, 107), "timer_settime": (223, 110), "timer_gettime": (224, 108),
    "timer_getoverrun": (225, 109), "timer_delete": (226, 111), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None), "epoll_ctl": (233, 21),
    "waitid": (247, 95), "inotify_init": (253, None), "inotify_add_watch": (254, 27), "inotify_rm_watch": (255, 28),
    "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "get_robust_list": (274, 100), "splice": (275, 76), "tee": (276, 77),
    "epoll_pwait": (281, 22), "signalfd": (282, None), "timerfd_create": (283, 85), "eventfd": (284, None),
    "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "signalfd4": (289, 74), "eventfd2": (290, 19),
    "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59), "inotify_init1": (294, 26), "preadv": (295, 69),
    "pwritev": (296, 70), "getcpu": (309, 168), "getrandom": (318, 278), "membarrier": (324, 283),
    "copy_file_range": (326, 285), "preadv2": (327, 286), "pwritev2": (328, 287), "statx": (332, 291),
    "rseq": (334, 293), "close_range": (436, 436), "faccessat2": (439, 439), "epoll_pwait2": (441, 441),
    "futex_waitv": (449, 449),
}
"""Calls for computing, reading, waiting, and communicating over open descriptors."""

FILES: Numbers = {
    "open": (2, None), "truncate": (76, 45), "ftruncate": (77, 46), "rename": (82, None), "mkdir": (83, None),
    "rmdir": (84, None), "creat": (85, None), "link": (86, None), "unlink": (87, None), "symlink": (88, None),
    "chmod": (90, None), "fchmod": (91, 52), "utime": (132, None), "utimes": (235, None), "openat": (257, 56),
    "mkdirat": (258, 34), "unlinkat": (263, 35), "renameat": (264, 38), "linkat": (265, 37), "symlinkat": (266, 36),
    "fchmodat": (268, 53), "sync_file_range": (277, 84), "utimensat": (280, 88), "fallocate": (285, 47),
    "renameat2": (316, 276),
}
"""Calls that create and change files."""

PROCESSES: Numbers = {
    "accept": (43, 202), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept4": (288, 242),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "kill": (62, 129), "setpgid": (109, 154),
    "setsid": (112, 157), "rt_sigqueueinfo": (129, 138), "setpriority": (141, 140), "tkill": (200, 130),
    "sched_setaffinity": (203, 122), "tgkill": (234, 131), "rt_tgsigqueueinfo": (297, 240), "execveat": (322, 281),
}
"""Calls for other processes, and for sockets by name: harmless within namespaces."""

CHECKED: Numbers = {
    "ioctl": (16, 29), "socket": (41, 198), "clone": (56, 220), "personality": (135, 92), "prctl": (157, 167),
    "prlimit64": (302, 261), "clone3": (435, 435), "open": (2, None), "openat": (257, 56), "kill": (62, 129),
    "tgkill": (234, 131),
}
"""Calls that are allowed depending on their arguments."""
# fmt: on

LAST_KNOWN = 450
"""Newer calls, which fail with "no such call", so that a C library falls back to older ones."""
