"""The system calls that no program of a sandbox gets: a classic BPF filter (seccomp(2)).

A list of what is refused, since a Python program may need any of the others: what reaches other processes or changes
how they run, as the one that starts the next program, the network, namespaces and mounts, the kernel's keys, clock and
modules, and memory that no limit counts. Refused calls fail with EPERM; another architecture's calls end the process.
"""

import platform
import struct

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16  # offsets in seccomp_data; of the first argument's low half
_NAMESPACES = 0x7E020000  # CLONE_NEW*
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_SOCK_STREAM = 1

# Number on x86_64, on aarch64 (-1: it has none); from the kernel's syscall tables.
_REFUSED = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
    "process_mrelease": (448, 448),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # how others run, the process that starts the next program among them
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # network: a pair of stream sockets is all there is
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    # namespaces, mounts, files by handle
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # memory and objects that no limit counts, or that outlive a process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # the machine
    "bpf": (321, 280),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
}
# Landlock leaves what is not a file's content to its owner and mode, and some files may be written by anybody.
_ATTRIBUTES = {
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
}
_CLONE, _CLONE3, _IOCTL, _SOCKETPAIR = (56, 220), (435, 435), (16, 29), (53, 199)
_PRLIMIT = (302, 261)  # of oneself (0) only
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*


def seccomp_filter(has_files: bool, machine: str = "") -> bytes:
    """Return the filter as the kernel takes it: 8 bytes an instruction. Raises KeyError for an unknown machine.

    Args:
      has_files: whether programs have files of their own, whose attributes they may change.
    """
    column, architecture = MACHINES[machine or platform.machine()]
    code = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), _answer(_KILL), (_LOAD, 0, 0, _NUMBER)]
    if column == 0:  # numbers from here on are the x32 calls
        code += [(_AT_LEAST, 0, 1, 0x40000000), _answer(_KILL)]
    for numbers in (_REFUSED if has_files else _REFUSED | _ATTRIBUTES).values():
        if numbers[column] >= 0:
            code += [(_EQUAL, 0, 1, numbers[column]), _answer(_ERRNO | _EPERM)]
    # Its flags lie in memory, which a filter cannot read; without it libc takes clone.
    code += [(_EQUAL, 0, 1, _CLONE3[column]), _answer(_ERRNO | _ENOSYS)]
    refuse, allow = _answer(_ERRNO | _EPERM), _answer(_ALLOW)
    code += [(_EQUAL, 0, 4, _CLONE[column]), _argument(0), (_ANY_BIT, 0, 1, _NAMESPACES), refuse, allow]
    code += [(_EQUAL, 0, 4, _PRLIMIT[column]), _argument(0), (_EQUAL, 0, 1, 0), allow, refuse]
    code += [(_EQUAL, 0, 5, _IOCTL[column]), _argument(1), (_EQUAL, 1, 0, _TIOCSTI), (_EQUAL, 0, 1, _TIOCLINUX)]
    code += [refuse, allow]
    code += [(_EQUAL, 0, 5, _SOCKETPAIR[column]), _argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, _SOCK_STREAM)]
    code += [refuse, allow, allow]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _argument(place: int) -> tuple[int, int, int, int]:
    return _LOAD, 0, 0, _ARGUMENT + 8 * place


def _answer(value: int) -> tuple[int, int, int, int]:
    return _RETURN, 0, 0, value
