"""Read the machine code of a kernel (SASS, from nvdisasm) and count a thread's instructions on the common path.

The common path is the longest path through the control flow, without cycles, that avoids rare code: calls, accesses to
global memory for single elements, and basic blocks that access few of a thread's vectors, if another block accesses
many. Rare code serves ragged edges, misaligned matrices and rare values. A loop over tiles, which accesses the vectors
of a thread, counts as one iteration; the instructions of other loops do not count. Apart from such loops the count is
an upper bound, because at every other branch the path takes the longer side.
"""

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
LABEL = re.compile(r"^(\.L_x_\d+|\.text\.\w+|[$.\w]+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
GLOBAL = ("LDG", "STG")
# Instructions that a multiprocessor executes for 16 or 64 threads per clock; all others it executes for 128 threads.
# Source: CUDA Programming Guide, "Arithmetic Instructions", compute capability 9.0.
SIXTEEN = ("MUFU", "F2F", "F2I", "I2F", "FLO", "POPC", "BREV")
SIXTY_FOUR = (
    "LOP3",
    "SHF",
    "SHL",
    "SHR",
    "ISETP",
    "FSETP",
    "FMNMX",
    "IMNMX",
    "VIMNMX",
    "SEL",
    "FSEL",
    "PRMT",
    "F2FP",
    "IMAD",
    "LEA",
    "IABS",
    "ISCADD",
    "PLOP3",
    "R2P",
)


@dataclass
class Block:
    """A basic block: instructions (predicate, operation, operands), and the indices of the blocks that may follow."""

    instructions: list[tuple[str, str, str]] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)
    exits: bool = False  # the last instruction may end the thread

    @property
    def rare(self) -> bool:
        """Tell whether the block accesses single elements or calls a function, as divisions do for rare operands."""
        return any(_of_one_element(op) or op.startswith("CALL") for _, op, _ in self.instructions)

    @property
    def wide(self) -> int:
        return sum(op.startswith(GLOBAL) and ".128" in op for _, op, _ in self.instructions)


def _of_one_element(op: str) -> bool:
    """Tell whether this operation loads or stores only 8 or 16 bits of global memory, which is one element or code."""
    return op.startswith(GLOBAL) and bool({"U16", "U8", "S8", "S16"} & set(op.split(".")))


@dataclass(frozen=True)
class Code:
    """The machine code of one kernel."""

    blocks: tuple[Block, ...]

    def everything(self) -> Iterator[str]:
        for block in self.blocks:
            for _, op, _ in block.instructions:
                yield op

    def common_path(self) -> Counter[str]:
        """Return how often each operation is executed on the common path."""
        return Code(_iterated_once(self.blocks))._path_between_loops()

    def _path_between_loops(self) -> Counter[str]:
        components = _in_cycles(self.blocks)
        # The longest path from the start of a block, or of a loop, to an exit; None if every path has rare code.
        best: dict[int, Counter[str] | None] = {}

        def members(index: int) -> set[int]:
            return components.get(index, {index})

        order, seen = [], set()
        stack = [(0, False)]
        while stack:  # depth first, without recursion: kernels have hundreds of blocks
            index, done = stack.pop()
            key = min(members(index))
            if done:
                order.append(key)
            elif key not in seen:
                seen.add(key)
                stack.append((key, True))
                stack += [(after, False) for after in self._after(members(key))]
        for key in order:
            nodes = members(key)
            following = [best[min(members(after))] for after in self._after(nodes)]
            possible = [path for path in following if path is not None]
            if any(self._is_rare(node) for node in nodes) or not (possible or self._exits(nodes)):
                best[key] = None
                continue
            own = Counter() if key in components else Counter(op for _, op, _ in self.blocks[key].instructions)
            best[key] = own + max(possible, key=_length, default=Counter())
        return best[min(members(0))] or Counter()

    def _is_rare(self, node: int) -> bool:
        """Tell whether a block cannot be on the common path.

        A block that accesses fewer than half as many vectors as another block, but at least one, serves threads at an
        edge of the matrix.
        """
        most = max(block.wide for block in self.blocks)
        return self.blocks[node].rare or 0 < self.blocks[node].wide < most // 2

    def _exits(self, nodes: set[int]) -> bool:
        return any(self.blocks[node].exits for node in nodes)

    def _after(self, nodes: set[int]) -> list[int]:
        return [after for node in nodes for after in self.blocks[node].successors if after not in nodes]


def _length(path: Counter[str]) -> tuple[int, int]:
    """Return a path's number of 128-bit accesses to global memory and its number of instructions, to compare paths."""
    return sum(n for op, n in path.items() if op.startswith(GLOBAL) and ".128" in op), path.total()


def _iterated_once(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Replace each jump back to the start of a loop over tiles by jumps to the blocks that follow the loop."""
    most = max(block.wide for block in blocks)
    result = list(blocks)
    for loop in {min(loop): loop for loop in _in_cycles(blocks).values()}.values():
        if not any(blocks[node].wide >= max(most // 2, 1) for node in loop):
            continue
        starts = {after for i, block in enumerate(blocks) if i not in loop for after in block.successors} & loop
        ends = sorted({after for node in loop for after in blocks[node].successors} - loop)
        for node in loop:
            if starts & set(blocks[node].successors):
                kept = [after for after in blocks[node].successors if after not in starts]
                result[node] = replace(blocks[node], successors=[*kept, *(end for end in ends if end not in kept)])
    return tuple(result)


def _in_cycles(blocks: tuple[Block, ...]) -> dict[int, set[int]]:
    """Return, for the index of each block in a loop, all blocks of its strongly connected component (Tarjan)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: dict[int, set[int]] = {}
    for root in range(len(blocks)):
        if root in index:
            continue
        work = [(root, iter(blocks[root].successors))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, successors = work[-1]
            for nxt in successors:
                if nxt not in index:
                    index[nxt] = low[nxt] = len(index)
                    stack.append(nxt)
                    work.append((nxt, iter(blocks[nxt].successors)))
                    break
                if nxt in stack:
                    low[node] = min(low[node], index[nxt])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = set()
                    while True:
                        member = stack.pop()
                        component.add(member)
                        if member == node:
                            break
                    if len(component) > 1 or node in blocks[node].successors:
                        found |= dict.fromkeys(component, component)
    return found


def disassemble(cubin: bytes) -> Code:
    """Return the machine code of a cubin's only kernel, as nvdisasm lists it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(nvdisasm()), "-c", file.name], capture_output=True, text=True, check=True)
    return parse(done.stdout)


def nvdisasm() -> Path | None:
    """Return the path of the program nvdisasm, or None if the package nvidia-cuda-nvdisasm is not installed."""
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((path for folder in folders for path in sorted(folder.rglob("bin/nvdisasm"))), None)


def parse(text: str) -> Code:
    blocks, names, ends = [Block()], {}, {}
    for line in text.splitlines():
        if label := LABEL.match(line.strip()):
            if blocks[-1].instructions:
                blocks.append(Block())
            names[label[1]] = len(blocks) - 1
            continue
        if not (found := INSTRUCTION.match(line)):
            continue
        predicate, op, operands = found[2] or "", found[3], found[4]
        blocks[-1].instructions.append((predicate, op, operands))
        if op.split(".")[0] in ("BRA", "EXIT", "RET", "BRX", "JMP"):
            ends[len(blocks) - 1] = (predicate or ("U" if ".DIV" in op else ""), op, operands)
            blocks.append(Block())
    for i, block in enumerate(blocks):
        predicate, op, operands = ends.get(i, ("fall", "", ""))
        block.exits = op.startswith("EXIT")
        if op.startswith("BRA") and (target := TARGET.search(operands)):
            block.successors.append(names[target[1]])
        conditional = predicate or (op.startswith("BRA") and operands.strip().startswith(("P", "!P", "UP", "!UP")))
        if conditional and i + 1 < len(blocks):
            block.successors.append(i + 1)
    return Code(tuple(blocks))


PARAMETERS_START = 0x210  # bytes in a kernel's constant bank before its parameters, on sm_90


def parameter_bytes(cubin: bytes) -> int:
    """Return the size of a kernel's parameters: the size of its constant bank less PARAMETERS_START."""
    start, size, count, names = (*struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58))
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    table = sections[names][4]
    for name, _, _, _, _, length in sections:
        end = cubin.index(b"\0", table + name)
        if cubin[table + name : end] == b".nv.constant0.run":
            return length - PARAMETERS_START
    raise ValueError("the cubin has no kernel `run`")


def resident_ctas(registers: int, threads: int, shared: int) -> int:
    """Return how many CTAs fit in a multiprocessor of sm_90: 65,536 registers, 2,048 threads, 227 KiB shared memory.

    registers: of a thread. threads, and shared (bytes of shared memory): of a CTA.
    """
    per_warp = -(-registers // 8) * 8 * 32
    return min(65536 // (per_warp * -(-threads // 32)), 2048 // threads, 227 * 1024 // (shared + 1024), 32)
