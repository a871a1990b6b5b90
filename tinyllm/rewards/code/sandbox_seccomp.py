"""The system calls a submission may not make, as a classic BPF program: bytes for bwrap's --seccomp or for prctl.

Denied calls fail with EPERM (clone3 with ENOSYS, so that libc falls back to clone, whose flags can be read). A call
of another architecture ends the process.
"""

from __future__ import annotations

import platform
import struct

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH of the machines that are supported."""
_X86 = (
    "socket 41 bind 49 connect 42 accept 43 accept4 288 listen 50 ptrace 101 process_vm_readv 310 "
    "process_vm_writev 311 kcmp 312 "
    "mount 165 umount2 166 pivot_root 155 chroot 161 unshare 272 setns 308 move_mount 429 open_tree 428 fsopen "
    "430 fsconfig 431 "
    "fsmount 432 fspick 433 mount_setattr 442 bpf 321 keyctl 250 add_key 248 request_key 249 perf_event_open 298 "
    "userfaultfd 323 io_uring_setup 425 io_uring_enter 426 io_uring_register 427 kexec_load 246 kexec_file_load 320 "
    "init_module 175 finit_module 313 delete_module 176 open_by_handle_at 304 name_to_handle_at 303 fanotify_init 300 "
    "memfd_create 319 memfd_secret 447 shmget 29 shmat 30 shmctl 31 msgget 68 semget 64 mq_open 240 pidfd_open 434 "
    "pidfd_getfd 438 pidfd_send_signal 424 reboot 169 swapon 167 swapoff 168 sethostname 170 setdomainname 171 "
    "acct 163 "
    "settimeofday 164 clock_settime 227 adjtimex 159 clock_adjtime 305 quotactl 179 nfsservctl 180 iopl 172 ioperm 173 "
    "modify_ldt 154 lookup_dcookie 212 syslog 103 vhangup 153 personality 135 mknod 133 mknodat 259 "
    "landlock_create_ruleset 444"
)
_ARM = (
    "socket 198 bind 200 connect 203 accept 202 accept4 242 listen 201 ptrace 117 process_vm_readv 270 "
    "process_vm_writev 271 "
    "kcmp 272 mount 40 umount2 39 pivot_root 41 chroot 51 unshare 97 setns 268 move_mount 429 open_tree 428 fsopen 430 "
    "fsconfig 431 fsmount 432 fspick 433 mount_setattr 442 bpf 280 keyctl 219 add_key 217 request_key 218 "
    "perf_event_open 241 "
    "userfaultfd 282 io_uring_setup 425 io_uring_enter 426 io_uring_register 427 kexec_load 104 kexec_file_load 294 "
    "init_module 105 finit_module 273 delete_module 106 open_by_handle_at 265 name_to_handle_at 264 fanotify_init 262 "
    "memfd_create 279 memfd_secret 447 shmget 194 shmat 196 shmctl 195 msgget 186 semget 190 mq_open 180 "
    "pidfd_open 434 "
    "pidfd_getfd 438 pidfd_send_signal 424 reboot 142 swapon 224 swapoff 225 sethostname 161 setdomainname 162 acct 89 "
    "settimeofday 170 clock_settime 112 adjtimex 171 clock_adjtime 266 quotactl 60 personality 92 mknodat 33 "
    "syslog 116 vhangup 58 "
    "landlock_create_ruleset 444"
)
_ALONE_X86 = (
    "fork 57 vfork 58 execve 59 execveat 322 kill 62 tkill 200 prlimit64 302 sched_setaffinity 203 "
    "setpriority 141 ioprio_set 251 sched_setscheduler 144 sched_setattr 314 rt_sigqueueinfo 129 "
    "rt_tgsigqueueinfo 297 truncate 76 chmod 90 fchmodat 268 chown 92 lchown 94 fchownat 260 utimensat 280 "
    "utime 132 utimes 235 futimesat 261 setxattr 188 lsetxattr 189"
)
_ALONE_ARM = (
    "execve 221 execveat 281 kill 129 tkill 130 prlimit64 261 sched_setaffinity 122 setpriority 140 "
    "ioprio_set 30 sched_setscheduler 119 sched_setattr 274 rt_sigqueueinfo 138 rt_tgsigqueueinfo 240 "
    "truncate 45 fchmodat 53 fchownat 54 utimensat 88 setxattr 5 lsetxattr 6"
)
_CALLS = {"x86_64": (_X86, _ALONE_X86, 56, 435), "aarch64": (_ARM, _ALONE_ARM, 220, 435)}
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_THREAD = 0x00010000
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 0x00050000 | 1, 0x00050000 | 38
_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06


def supported() -> bool:
    """Whether this machine's system calls are known."""
    return platform.machine() in _CALLS


def program(alone: bool = False) -> bytes:
    """The filter as struct sock_filter[]. alone: there is no namespace, so new processes and signals are denied too."""
    machine = platform.machine()
    names, more, clone, clone3 = _CALLS[machine]
    numbers = [int(word) for word in (names + (" " + more if alone else "")).split()[1::2]]
    code: list[tuple[int, int, int, int]] = []

    def add(op: int, value: int, yes: int = 0, no: int = 0) -> None:
        code.append((op, yes, no, value))

    add(_LOAD, 4)  # architecture
    add(_JEQ, ARCHES[machine], 1, 0)
    add(_RET, _KILL)
    add(_LOAD, 0)  # number of the call
    if machine == "x86_64":
        add(_JGE, 0x40000000, 0, 1)  # x32
        add(_RET, _KILL)
    add(_JEQ, clone3, 0, 1)
    add(_RET, _ENOSYS)
    for number in numbers:
        add(_JEQ, number, 0, 1)
        add(_RET, _EPERM)
    add(_JEQ, clone, 1, 0)
    add(_RET, _ALLOW)
    add(_LOAD, 16)  # flags of clone
    if alone:
        add(_JSET, _THREAD, 1, 0)
        add(_RET, _EPERM)
    add(_JSET, _NEW_NAMESPACES, 0, 1)
    add(_RET, _EPERM)
    add(_RET, _ALLOW)
    return b"".join(struct.pack("=HBBI", op, yes, no, value) for op, yes, no, value in code)
