"""What runs inside the sandbox around a submission. Standard library only; its text is given to python -c.

The first argument is the descriptor that brings the request (JSON, to its end), the second the one that takes reports,
each line led by the request's secret. Expected values never come here. A submission can send what it likes: it is
compared outside, so a forged report is only an answer.
"""


def guest() -> None:
    import marshal
    import os
    import resource
    import sys

    with os.fdopen(int(sys.argv[1]), "rb") as stream:
        request = marshal.loads(stream.read())
    limits = request["limits"]
    for name, value in limits["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if request["uid"]:
        os.setgroups([])
        os.setresgid(request["uid"], request["uid"], request["uid"])
        os.setresuid(request["uid"], request["uid"], request["uid"])
    if request["landlock"]:
        _landlock(request["landlock"], bytes.fromhex(request["seccomp"]))
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(limits["recursion"])
    secret, kind, source = request["secret"], request["kind"], request["source"]
    channel = os.fdopen(int(sys.argv[2]), "w")

    def report(number, text):
        channel.write(f"{secret} {number} {text}\n")
        channel.flush()

    report("hello", os.getpid())
    if kind == "program":
        channel.close()
        space = {"__name__": "__main__", "__builtins__": __builtins__}
        sys.argv = ["submission"]
        exec(compile(source, "submission", "exec"), space)
        return
    _calls(source, request["entry"], request["calls"], report)


def _calls(source, entry, calls, report):
    """Call the submission's function on each input; report each value as JSON, or what it raised."""
    space = {"__name__": "submission", "__builtins__": __builtins__}
    try:
        exec(compile(source, "submission", "exec"), space)
        function = space[entry]
    except BaseException as error:  # noqa: BLE001  whatever a submission raises is its own
        report("failed", type(error).__name__)
        return
    for number, arguments in enumerate(calls):
        try:
            text = _plain(function(*arguments), 0)
        except BaseException as error:  # noqa: BLE001  whatever a submission raises is its own
            text = '{"raised": "' + type(error).__name__ + '"}'
        report(number, text)
    report("done", len(calls))


def _plain(value, depth):
    """The value as JSON that keeps exact types: subclasses and other objects are not data."""
    from _json import encode_basestring_ascii as quoted

    kind = type(value)
    if depth > 60:
        raise ValueError("nested too deeply")
    if value is None or kind is bool:
        return {None: "[null]", True: "[true]", False: "[false]"}[value]
    if kind is int:
        return f"[{value}]"
    if kind is float:
        return "[NaN]" if value != value else f"[{value!r}]".replace("inf", "Infinity")
    if kind is str:
        return f"[{quoted(value)}]"
    if kind in (list, tuple, set, frozenset):
        items = ", ".join([_plain(item, depth + 1) for item in value])
        return f'["{kind.__name__}", [{items}]]'
    if kind is dict:
        pairs = [f"[{_plain(key, depth + 1)}, {_plain(item, depth + 1)}]" for key, item in value.items()]
        return f'["dict", [{", ".join(pairs)}]]'
    raise TypeError("not plain data")


def _landlock(readable, program):
    """No reading outside `readable`, no writing at all, no signals out; then the filter of system calls."""
    import ctypes
    import os

    libc = ctypes.CDLL(None, use_errno=True)

    def check(result, what):
        if result < 0:
            raise OSError(ctypes.get_errno(), what)
        return result

    version = check(libc.syscall(444, None, 0, 1), "landlock")
    rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)  # access rights this kernel knows, one bit each

    class Attributes(ctypes.Structure):
        _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]

    attributes = Attributes((1 << rights) - 1, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = check(libc.syscall(444, ctypes.byref(attributes), ctypes.c_size_t(size), 0), "landlock_create_ruleset")
    for path in readable:
        if os.path.exists(path):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = (1 << 2) | (1 << 3) | (1 << 0) if os.path.isdir(path) else (1 << 2) | (1 << 0)
            if path == "/dev/null":
                allowed |= 1 << 1
            rule = Beneath(allowed, place)
            check(libc.syscall(445, rules, 1, ctypes.byref(rule), 0), "landlock_add_rule")
            os.close(place)
    check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    check(libc.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    check(libc.prctl(22, 2, ctypes.byref(Filter(len(program) // 8, program)), 0, 0), "seccomp")


guest()
