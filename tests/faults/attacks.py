"""What code in the sandbox may try. Each attack is a piece of Python that sets `got` if it achieved something; raising, or
leaving `got` unset or false, means that it was stopped. The names in capitals are given by the test that runs them."""

from __future__ import annotations

from typing import NamedTuple

NAMESPACES, FILTER, HOOK = "namespaces", "filter", "hook"
"""What stops an attack: the sandbox's own view of the system, the kernel's filters (seccomp and Landlock), the audit hook."""
ONLY_NAMESPACES = frozenset({NAMESPACES})
EVERYTHING = frozenset({NAMESPACES, FILTER, HOOK})
KERNEL = frozenset({NAMESPACES, FILTER})


class Attack(NamedTuple):
    name: str
    code: str
    stopped_by: frozenset[str] = EVERYTHING


def attack(name: str, code: str, stopped_by: frozenset[str] = EVERYTHING) -> Attack:
    return Attack(name, code, stopped_by)


READ = [
    attack("open", "got = open(SECRET).read()"),
    attack("open as bytes", "got = open(SECRET.encode()).read()"),
    attack("os.open", "import os; got = os.read(os.open(SECRET, os.O_RDONLY), 99)"),
    attack("FileIO", "import io; got = io.FileIO(SECRET).read()"),
    attack("open_code", "import io; got = io.open_code(SECRET).read()"),
    attack("_io", "import _io; got = _io.open(SECRET).read()"),
    attack("pathlib", "import pathlib; got = pathlib.Path(SECRET).read_text()"),
    attack("path object", "class P:\n    def __fspath__(self): return SECRET\nP.SECRET = SECRET\ngot = open(P()).read()"),
    attack("path that changes its mind", """
class P:
    asked = 0
    def __fspath__(self):
        P.asked += 1
        return SECRET if P.asked % 2 else 'x'
import os
for _ in range(4):
    try: got = os.read(os.open(P(), os.O_RDONLY), 99)
    except OSError: pass
""", KERNEL),
    attack("string that lies", """
class S(str):
    __slots__ = ()
    def startswith(self, *a): return True
    def partition(self, *a): return ('', '', '')
    def encode(self, *a): return b'x'
got = open(S(SECRET)).read()
"""),
    attack("codecs", "import codecs; got = codecs.open(SECRET).read()"),
    attack("linecache", "import linecache; got = linecache.getlines(SECRET)"),
    attack("fileinput", "import fileinput; got = list(fileinput.input([SECRET]))"),
    attack("tokenize", "import tokenize; got = tokenize.open(SECRET).read()"),
    attack("loader", "import importlib.machinery as m; got = m.SourceFileLoader('x', SECRET).get_data(SECRET)"),
    attack("runpy", "import runpy; got = runpy.run_path(SCRIPT)"),
    attack("import from its folder", "import sys; sys.path.insert(0, OUTSIDE); import script_of_the_user; got = 1"),
    attack("configparser", "import configparser; got = configparser.ConfigParser().read(SECRET)"),
    attack("netrc", "import netrc; got = netrc.netrc(SECRET) or 1"),
    attack("mmap", "import mmap, os; got = mmap.mmap(os.open(SECRET, 0), 4, prot=mmap.PROT_READ)[:]"),
    attack("sqlite", "import sqlite3; got = sqlite3.connect(f'file:{SECRET}?mode=ro', uri=True).execute('select 1').fetchall()"),
    attack("dbm", "import dbm.dumb; got = dbm.dumb.open(SECRET, 'r')"),
    attack("zip", "import zipfile; got = zipfile.ZipFile(ARCHIVE).namelist()"),
    attack("tar", "import tarfile; got = tarfile.open(SECRET).getnames() or 1"),
    attack("copy", "import shutil; shutil.copy(SECRET, 'copied'); got = open('copied').read()"),
    attack("hard link", "import os; os.link(SECRET, 'linked'); got = open('linked').read()"),
    attack("symbolic link", "import os; os.symlink(SECRET, 'symlinked'); got = open('symlinked').read()"),
    attack("link to the root", "import os; os.symlink('/', 'root'); got = open('root' + SECRET).read()"),
    attack("chain of links", "import os; os.symlink('b', 'a'); os.symlink(OUTSIDE, 'b'); got = open('a/secret').read()"),
    attack("upwards", "got = open('../' * 30 + SECRET[1:]).read()"),
    attack("through a library folder", "import os; got = open(os.path.dirname(os.__file__) + '/..' * 20 + SECRET).read()"),
    attack("doubled slashes", "got = open('//' + SECRET).read()"),
    attack("change of folder", "import os; os.chdir(OUTSIDE); got = open('secret').read()"),
    attack("open folder", "import os; f = os.open('/', os.O_RDONLY); got = os.read(os.open(SECRET[1:], 0, dir_fd=f), 9)"),
    attack("open folder of the library", """
import os
library = os.path.dirname(os.__file__)
depth = len(library.strip('/').split('/'))
here = os.getcwd()
os.makedirs('/'.join(['down'] * (depth + 1)), exist_ok=True)
os.chdir('/'.join(['down'] * (depth + 1)))
try: got = os.read(os.open('../' * depth + SECRET[1:], 0, dir_fd=os.open(library, os.O_RDONLY)), 9)
finally: os.chdir(here)
""", KERNEL),
    attack("proc root", "got = open('/proc/self/root' + SECRET).read()"),
    attack("proc cwd", "got = open('/proc/self/cwd/' + '../' * 30 + SECRET[1:]).read()"),
    attack("fifo", "import os; got = os.read(os.open(FIFO, os.O_RDONLY | os.O_NONBLOCK), 9)"),
    attack("sendfile", "import os; got = os.sendfile(os.open('s', 65), os.open(SECRET, 0), 0, 4)"),
    attack("list", "import os; got = os.listdir(OUTSIDE)"),
    attack("list the root", "import os; got = [x for x in os.listdir('/') if x in ('home', 'root', 'proc', 'etc', 'run')]"),
    attack("scandir", "import os; got = list(os.scandir(OUTSIDE))"),
    attack("walk", "import os; got = [x for x in os.walk(OUTSIDE)]"),
    attack("fwalk", "import os; got = [x for x in os.fwalk(OUTSIDE)]"),
    attack("glob", "import glob; got = glob.glob(OUTSIDE + '/*')"),
    attack("stat", "import os; got = os.stat(SECRET).st_size", ONLY_NAMESPACES),
    attack("exists", "import os; got = os.path.exists(SECRET)", ONLY_NAMESPACES),
    attack("inotify", "import ctypes; c = ctypes.CDLL(None); got = c.inotify_add_watch(c.inotify_init(), SECRET.encode(), 1) > 0",
           EVERYTHING),
    attack("C library", "import ctypes; got = ctypes.CDLL(None).open(SECRET.encode(), 0) > 0"),
    attack("file handle", """
import ctypes
handle = ctypes.create_string_buffer(bytes([128, 0, 0, 0]), 200)
got = ctypes.CDLL(None).name_to_handle_at(-100, SECRET.encode(), handle, ctypes.byref(ctypes.c_int()), 0) == 0
"""),
    attack("io_uring", "import ctypes; got = ctypes.CDLL(None).syscall(425, 8, bytes(200)) >= 0"),
]

HOST = [
    attack("passwd", "got = open('/etc/passwd').read()"),
    attack("passwd by the C library", "import pwd; got = pwd.getpwall()", KERNEL),
    attack("groups by the C library", "import grp; got = grp.getgrall()", KERNEL),
    attack("host name file", "got = open('/etc/hostname').read() or 1"),
    attack("host name", "import os; got = os.uname().nodename if os.uname().nodename == HOST_NAME else ''", ONLY_NAMESPACES),
    attack("command lines", "got = open(f'/proc/{PID}/cmdline').read()"),
    attack("environment of the grader", "got = open(f'/proc/{PID}/environ').read()"),
    attack("own environment file", "got = open('/proc/self/environ').read() or 1"),
    attack("own environment", "import os; got = {k: v for k, v in os.environ.items() if 'TOKEN' in k}"),
    attack("processes", "import os; got = [x for x in os.listdir('/proc') if x.isdigit()]"),
    attack("memory of the grader", "got = open(f'/proc/{PID}/mem', 'rb') or 1"),
    attack("own memory", "got = open('/proc/self/mem', 'r+b') or 1"),
    attack("connections", "got = open('/proc/net/tcp').read()"),
    attack("kernel messages", "got = open('/dev/kmsg').read(1)"),
    attack("disks", "import os; got = os.open('/dev/vda', os.O_RDONLY) or os.open('/dev/sda', os.O_RDONLY)"),
    attack("terminal", "got = open('/dev/tty', 'w') or 1"),
    attack("devices", "import os; got = os.listdir('/sys/class')"),
    attack("sockets of services", "import os; got = os.listdir('/run')"),
    attack("parent", "import os; got = os.getppid() and os.getpgid(os.getppid())", ONLY_NAMESPACES),
    attack("home", "import os; got = os.listdir(HOME)"),
    attack("home exists", "import os; got = os.path.lexists(HOME)", ONLY_NAMESPACES),
    attack("home of root exists", "import os; got = os.path.lexists('/root')", ONLY_NAMESPACES),
    attack("homes exist", "import os; got = os.path.lexists('/home')", ONLY_NAMESPACES),
    attack("folders above Python", "import os; got = [place for place in ABOVE if os.path.lexists(place)]", ONLY_NAMESPACES),
    attack("home by Python's own paths", """
import sys
known = [sys.prefix, sys.base_prefix, sys.executable, *sys.path, *(getattr(m, '__file__', None) or '' for m in list(
    sys.modules.values()))]
got = [path for path in known if any(path.startswith(place + '/') for place in ABOVE) and 'paceline' not in path]
""", ONLY_NAMESPACES),
    attack("tests in its arguments", "import sys; got = [x for x in sys.argv if x]"),
    attack("input", "import sys; got = sys.stdin.read()"),
]

WRITE = [
    attack("create", "open(TARGET, 'w').write('x'); got = 1"),
    attack("create exclusively", "open(TARGET, 'x').write('x'); got = 1"),
    attack("append", "open(SECRET, 'a').write('x'); got = 1"),
    attack("update", "open(SECRET, 'r+').write('x'); got = 1"),
    attack("os.open to create", "import os; os.open(TARGET, os.O_CREAT | os.O_WRONLY); got = 1"),
    attack("touch", "import pathlib; pathlib.Path(TARGET).touch(); got = 1"),
    attack("mkdir", "import os; os.mkdir(TARGET); got = 1"),
    attack("makedirs", "import os; os.makedirs(TARGET + '/a/b'); got = 1"),
    attack("make a link there", "import os; os.symlink('/', TARGET); got = 1"),
    attack("make a fifo there", "import os; os.mkfifo(TARGET); got = 1", KERNEL),
    attack("make a device", "import os, stat; os.mknod('device', 0o600 | stat.S_IFBLK, os.makedev(8, 0)); got = 1", KERNEL),
    attack("move there", "import os; open('own', 'w').close(); os.rename('own', TARGET); got = 1"),
    attack("replace", "import os; open('own', 'w').close(); os.replace('own', SECRET); got = 1"),
    attack("take away", "import os; os.rename(SECRET, 'own'); got = 1"),
    attack("remove", "import os; os.remove(SECRET); got = 1"),
    attack("unlink by folder", "import os; os.unlink('secret', dir_fd=os.open(OUTSIDE, os.O_RDONLY)); got = 1"),
    attack("remove a folder", "import os; os.rmdir(EMPTY); got = 1"),
    attack("remove a tree", "import shutil; shutil.rmtree(OUTSIDE, onerror=None) ; got = 1"),
    attack("truncate", "import os; os.truncate(SECRET, 0); got = 1"),
    attack("mode", "import os; os.chmod(SECRET, 0o777); got = 1"),
    attack("owner", "import os; os.chown(SECRET, os.getuid(), os.getgid()); got = 1"),
    attack("times", "import os; os.utime(SECRET, (1, 1)); got = 1"),
    attack("attributes", "import os; os.setxattr(SECRET, 'user.x', b'1'); got = 1"),
    attack("temporary file elsewhere", "import tempfile; got = tempfile.NamedTemporaryFile(dir=OUTSIDE)"),
    attack("shared memory", "open('/dev/shm/paceline-attack', 'w').write('x'); got = 1"),
    attack("log", "import logging; logging.FileHandler(TARGET); got = 1"),
    attack("archive", "import zipfile; zipfile.ZipFile(TARGET, 'w').writestr('a', 'b'); got = 1"),
    attack("unpack upwards", """
import io, tarfile
data = io.BytesIO()
with tarfile.open(fileobj=data, mode='w') as tar: tar.addfile(tarfile.TarInfo('../' * 30 + TARGET[1:]))
data.seek(0)
tarfile.open(fileobj=data).extractall('.'); got = __import__('os').path.lexists(TARGET)
"""),
    attack("library", "import os; open(os.__file__, 'a').close(); got = 1"),
    attack("link and write", "import os; os.symlink(OUTSIDE, 'way'); open('way/new', 'w').close(); got = 1"),
]

NETWORK = [
    attack("tcp", "import socket; got = socket.create_connection(('127.0.0.1', PORT), 1)"),
    attack("tcp without DNS", "import socket; s = socket.socket(); s.connect(('127.0.0.1', PORT)); got = s"),
    attack("_socket", "import _socket; s = _socket.socket(); s.connect(('127.0.0.1', PORT)); got = s"),
    attack("udp", "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', PORT)); got = s"),
    attack("unix socket", "import socket; s = socket.socket(socket.AF_UNIX); s.connect(SOCKET); got = s"),
    attack("abstract socket", "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0' + ABSTRACT); got = s"),
    attack("netlink", "import socket; got = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    attack("raw", "import socket; got = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    attack("listen", "import socket; s = socket.create_server(('127.0.0.1', 0)); got = s"),
    attack("http", "import urllib.request; got = urllib.request.urlopen(f'http://127.0.0.1:{PORT}', timeout=1)"),
    attack("asyncio", "import asyncio; got = asyncio.run(asyncio.open_connection('127.0.0.1', PORT))"),
    attack("connection", "import multiprocessing.connection as c; got = c.Client(SOCKET)"),
    attack("smtp", "import smtplib; got = smtplib.SMTP('127.0.0.1', PORT, timeout=1)"),
    attack("socket by C", "import ctypes; got = ctypes.CDLL(None).socket(2, 1, 0) >= 0"),
    attack("names", "import socket; got = socket.getaddrinfo('example.org', 80)"),
]

PROCESSES = [
    attack("fork", "import os\nif os.fork() == 0: os._exit(0)\ngot = 1"),
    attack("forkpty", "import os\nif os.forkpty()[0] == 0: os._exit(0)\ngot = 1"),
    attack("system", "import os; got = os.system('true') == 0"),
    attack("popen", "import os; got = os.popen('echo x').read()"),
    attack("subprocess", "import subprocess; got = subprocess.run(['/bin/echo', 'x'], capture_output=True).stdout"),
    attack("shell", "import subprocess; got = subprocess.check_output('echo x', shell=True)"),
    attack("fork_exec", """
import _posixsubprocess as p, os
r, w = os.pipe()
got = p.fork_exec([b'/bin/true'], [b'/bin/true'], True, (), None, None, -1, -1, -1, -1, -1, -1, r, w, False, False, 0, None,
                  None, None, -1, None, False)
"""),
    attack("posix_spawn", "import os; got = os.posix_spawn('/bin/true', ['true'], {})"),
    attack("spawn", "import os; got = os.spawnv(os.P_NOWAIT, '/bin/true', ['true'])"),
    attack("multiprocessing", "import multiprocessing as m; p = m.get_context('fork').Process(target=int); p.start(); got = 1"),
    attack("executor", "import concurrent.futures as f; got = f.ProcessPoolExecutor(1).submit(int).result(2) + 1"),
    attack("pty", "import pty; got = pty.fork()[0] or __import__('os')._exit(0)"),
    attack("fork by C", "import ctypes, os\npid = ctypes.CDLL(None).fork()\nif pid == 0: os._exit(0)\ngot = pid > 0"),
    attack("vfork by C", "import ctypes; got = ctypes.CDLL(None).syscall(VFORK, 17, 0, 0, 0, 0) > 0"),
    attack("clone3", "import ctypes; got = ctypes.CDLL(None).syscall(435, bytes(88), 88) > 0"),
    attack("interpreter", "import _xxsubinterpreters as x; got = x.create() or 1", frozenset({HOOK})),
]

SIGNALS = [
    attack("signal to the grader", "import os; os.kill(PID, 0); got = 1"),
    attack("signal by descriptor", "import os, signal; signal.pidfd_send_signal(os.pidfd_open(PID), 0); got = 1", KERNEL),
    attack("signal to the group", "import os; os.killpg(os.getpgid(0), 0); got = 1"),
    attack("limits of the grader", "import resource; got = resource.prlimit(PID, 7)", frozenset({NAMESPACES, HOOK})),
    attack("priority of the grader", "import os; os.setpriority(os.PRIO_PROCESS, PID, 19); got = 1", ONLY_NAMESPACES),
    attack("cores of the grader", "import os; os.sched_setaffinity(PID, {0}); got = 1", ONLY_NAMESPACES),
    attack("debugger", "import ctypes; got = ctypes.CDLL(None).ptrace(16, PID, 0, 0) == 0"),
    attack("memory by C", """
import ctypes
local, remote = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8), (ctypes.c_size_t * 2)(4096, 8)
ctypes.set_errno(0)
got = ctypes.CDLL(None, use_errno=True).process_vm_readv(PID, local, 1, remote, 1, 0) >= 0 or ctypes.get_errno() == 14
"""),
    attack("new session", "import os; os.setsid(); got = 1", frozenset({FILTER})),
    attack("outlive", "import ctypes; got = ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0", frozenset({FILTER, HOOK})),
]

LIMITS = [
    attack("memory", "got = len(bytearray(10**10))", frozenset({"limits"})),
    attack("anonymous memory", "import mmap; got = mmap.mmap(-1, 10**10)", frozenset({"limits"})),
    attack("file size", "f = open('big', 'wb'); f.write(bytes(9 << 20)); f.flush(); got = 1", frozenset({"limits"})),
    attack("raise a limit", "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); got = 1", frozenset({"limits", HOOK})),
    attack("descriptors", "import os; got = [os.open('/dev/null', 0) for _ in range(100)]", frozenset({"limits"})),
    attack("file in memory", "import os; got = os.memfd_create('x') >= 0", KERNEL),
    attack("many small files", """
import os
os.mkdir('many')
for number in range(100):
    with open(f'many/{number}', 'wb') as file: file.write(bytes(1 << 20))
got = 1
""", ONLY_NAMESPACES),
    attack("many empty files", "import os\nos.mkdir('empty')\nfor i in range(6000): open(f'empty/{i}', 'w').close()\ngot = 1",
           ONLY_NAMESPACES),
]

EXECUTION = [
    attack("executable memory of a file of its own", """
import mmap
with open('code', 'w+b') as file:
    file.write(bytes(4096)); file.flush()
    got = mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
""", ONLY_NAMESPACES),
    attack("library of its own", """
import ctypes, shutil
shutil.copy(__import__('_ctypes').__file__, 'own.so')
got = ctypes.CDLL('./own.so')
""", frozenset({NAMESPACES, HOOK})),
    attack("module of its own", """
import importlib.machinery as m, importlib.util as u, shutil
shutil.copy(u.find_spec('_json').origin, 'module.so')
loader = m.ExtensionFileLoader('_json', './module.so')
got = u.module_from_spec(u.spec_from_loader('_json', loader))
""", ONLY_NAMESPACES),
]

KERNEL_INTERFACES = [
    attack(name, f"import ctypes; got = ctypes.CDLL(None).{call}", KERNEL | {HOOK}) for name, call in (
        ("unshare", "unshare(0x10000000) == 0"), ("unshare mounts", "unshare(0x20000) == 0"),
        ("mount", "mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0"), ("unmount", "umount2(b'/', 2) == 0"),
        ("chroot", "chroot(b'.') == 0"), ("keys", "syscall(KEYCTL, 0, -3, 1) >= 0"),
        ("bpf", "syscall(280 if AARCH64 else 321, 0, bytes(64), 64) >= 0"),
        ("performance counters", "syscall(241 if AARCH64 else 298, bytes(128), 0, -1, -1, 0) >= 0"),
        ("userfaultfd", "syscall(282 if AARCH64 else 323, 1) >= 0"),
        ("shared memory segment", "shmget(0, 4096, 0o1600) >= 0"), ("message queue", "msgget(0, 0o1600) >= 0"),
        ("kernel log", "klogctl(3, ctypes.create_string_buffer(64), 64) >= 0"),
        ("personality", "personality(0x0040000) >= 0"))
]

TRICKS = {
    "realpath": ("import os\nkept = os.path.realpath\nos.path.realpath = lambda *a, **k: os.getcwd()",
                 "os.path.realpath = kept"),
    "constants": ("import sys\nfor name in ('guard', 'cage', 'player'):\n"
                  "    for key in ('_REFUSED', '_CHANGES', '_LOOKS', '_MODULES'):\n"
                  "        if name in sys.modules: setattr(sys.modules[name], key, ())", ""),
    "builtins": ("import builtins\nkept = {name: getattr(builtins, name) for name in ('isinstance', 'any', 'all', 'type')}\n"
                 "builtins.isinstance = builtins.any = builtins.all = lambda *a: True\nbuiltins.type = lambda *a: int",
                 "vars(builtins).update(kept)"),
    "posix": ("import posix\nkept = dict(vars(posix))\nposix.readlink = lambda *a, **k: '/dev/null'\n"
              "posix.getcwd = posix.fspath = lambda *a: '/dev/null'", "vars(posix).update(kept)"),
    "another hook": ("import sys\ntry: sys.addaudithook(lambda *a: None)\nexcept PermissionError: pass", ""),
    "hook's frame": ("""
try: open(SECRET)
except PermissionError as error:
    trace = error.__traceback__
    while trace:
        frame = trace.tb_frame
        if 'readable' in frame.f_locals:
            for space in (frame.f_globals, frame.f_locals, frame.f_builtins):
                for key in ('readable', 'writable', 'roots'):
                    try: space[key] = ('/',)
                    except Exception: pass
            for value in list(frame.f_locals.values()):
                for cell in getattr(value, '__closure__', None) or ():
                    try: cell.cell_contents = ('/',)
                    except Exception: pass
        trace = trace.tb_next
except OSError: pass
""", ""),
    "hook's code": ("import gc\nfor item in gc.get_objects():\n"
                    "    if getattr(item, '__name__', '') == 'hook': item.__code__ = (lambda *a: 0).__code__", ""),
    "trace": ("import sys\ntry: sys.settrace(lambda *a: None)\nexcept PermissionError: pass", ""),
}
"""Ways to disarm the audit hook: what comes before an attack, and what restores the process after it."""


def _tricked() -> list[Attack]:
    found = []
    for trick, (before, after) in TRICKS.items():
        for base in (READ[0], WRITE[0], NETWORK[1], PROCESSES[2]):
            body = "\n".join("    " + line for line in f"{before}\n{base.code}".splitlines())
            found.append(attack(f"{trick}, then {base.name}", f"try:\n{body}\nfinally:\n    {after or 'pass'}"))
    return found


ATTACKS = [*READ, *HOST, *WRITE, *NETWORK, *PROCESSES, *SIGNALS, *EXECUTION, *LIMITS, *KERNEL_INTERFACES, *_tricked()]
assert len({each.name for each in ATTACKS}) == len(ATTACKS)

RUN_ATTACKS = '''
def run_attacks(attacks, names):
    """What each attack got, for those that got something."""
    import contextlib, os, sys
    home, found = os.getcwd(), {}
    for number, (name, code) in enumerate(attacks):
        scope = {**names}
        try:
            os.chdir(home)
            with contextlib.suppress(OSError):  # where nothing can be written
                os.mkdir(f"attack-{number}")
                os.chdir(f"attack-{number}")
            exec(code, scope)
        except BaseException as error:
            scope["error"] = error
        if scope.get("got"):
            found[name] = repr(scope["got"])[:60]
        scope.clear()
        error = None
    return found
'''
