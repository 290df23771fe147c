"""The bufferization plan, as plain data: hazards, roots and fences, on small exhaustive cases."""

from __future__ import annotations

import itertools

import torch

from aliasstorage import Window
from aliasstorage.bufferize.plan import Read, Write, choose_roots, plan, slice_of

A = Window(torch.uint8, (4,))
B = Window(torch.uint8, (4,), byte_offset=2)
C = Window(torch.int16, (2,), byte_offset=4)
D = Window(torch.int8, (4,))
WINDOWS = (A, B, C, D)


def run(reads, writes, result):
    """Simulate an in-place program on bytes, and check every use sees its version's bytes.

    Memory holds, for each byte, the version that wrote it last. A use is right when each byte of
    its window was last written by the newest write that its version includes.
    """
    end = 100
    versions = [[0] * 8]
    for write in writes:
        memory = list(versions[-1])
        memory[write.window.span[0] : write.window.span[1]] = [write.version] * write.window.nbytes
        versions.append(memory)
    copies = {copy.read: copy for copy in result.copies}

    def memory_before(position, inclusive):
        memory = [0] * 8
        for write in writes:
            if write.position < position or (inclusive and write.position == position):
                low, high = write.window.span
                memory[low:high] = [write.version] * write.window.nbytes
        return memory

    for index, read in enumerate(reads):
        low, high = read.window.span
        want = versions[read.version][low:high]
        if index in copies:
            got = memory_before(copies[index].position, inclusive=False)
            assert got[low:high] == want, (read, writes)
            continue
        assert not read.escapes
        for use in read.uses:
            got = memory_before(min(use, end), inclusive=False)
            assert got[low:high] == want, (read, use, writes)


def test_every_small_program():
    """Two writes and one read at every version, place and use."""
    for first, second, seen in itertools.product(WINDOWS, repeat=3):
        for version, use in itertools.product(range(3), range(3)):
            writes = [Write(1, first, 10), Write(2, second, 20)]
            made = [5, 15, 25][version]
            used = [made + 1, 18, 28][use]
            if used <= made:
                continue
            for escapes in (False, True):
                uses = (used, 100) if escapes else (used,)
                reads = [Read(version, seen, made, uses, frozenset(), escapes)]
                result = plan(reads, writes)
                run(reads, writes, result)
                needless = [c for c in result.copies if not escapes and c.overwritten_by is None]
                assert not needless


def test_no_copy_without_a_hazard():
    reads = [Read(0, A, 1, (3,)), Read(1, A, 12, (14,))]
    assert plan(reads, [Write(1, A, 10)]).copies == []
    disjoint = [Read(0, A, 1, (30,))]
    assert plan(disjoint, [Write(1, C, 10)]).copies == []


def test_the_target_of_a_write_is_not_a_hazard():
    write = Write(1, A, 10)
    assert plan([Read(0, A, 1, (10,), frozenset({10}))], [write]).copies == []
    assert len(plan([Read(0, A, 1, (10,))], [write]).copies) == 1


def fences_separate(reads, writes, result):
    """Check that conflicting accesses through different roots have a fence between them."""
    copied = {copy.read: copy.position for copy in result.copies}
    accesses = [(w.position, True, w.window) for w in writes]
    for index, read in enumerate(reads):
        positions = (copied[index],) if index in copied else read.uses
        accesses += [(p, False, read.window) for p in positions]
    accesses.sort(key=lambda a: a[:2])
    for (p, w, x), (q, v, y) in itertools.combinations(accesses, 2):
        root_x, root_y = result.root_of[x], result.root_of[y]
        if root_x == root_y or not (w or v) or not x.overlaps(y) or p == q:
            continue
        assert any(
            p < fence.position <= q and {root_x, root_y} <= set(fence.roots)
            for fence in result.fences
        ), (accesses, result)


def test_fences_separate_conflicts():
    for windows in itertools.product(WINDOWS, repeat=4):
        writes = [Write(1, windows[0], 10), Write(2, windows[1], 20)]
        reads = [Read(1, windows[2], 12, (14,)), Read(2, windows[3], 22, (24,))]
        result = plan(reads, writes)
        fences_separate(reads, writes, result)
        if len(result.roots) == 1:
            assert result.fences == []


def test_disjoint_windows_need_no_fence_even_if_their_spans_interleave():
    conv = Window(torch.bfloat16, (8, 6), (32, 1))
    ssm = Window(torch.float32, (8, 12), (16, 1), byte_offset=12)
    result = plan([Read(0, ssm, 1, (12,))], [Write(1, conv, 10), Write(2, ssm, 20)])
    assert result.fences == []
    assert result.copies == []


def test_hybrid_layers_need_one_fence():
    """Three layers with states in the same pages, then attention over all of them."""
    conv = Window(torch.bfloat16, (8, 6), (32, 1))
    ssm = Window(torch.float32, (8, 12), (16, 1), byte_offset=12)
    kv = Window(torch.bfloat16, (8, 32))
    reads, writes, position, version = [], [], 0, 0
    for _ in range(3):
        for window in (conv, ssm):
            reads.append(Read(version, window, position + 1, (position + 2,)))
            version += 1
            writes.append(Write(version, window, position + 3))
            position += 4
    writes.append(Write(version + 1, kv, position + 1))
    reads.append(Read(version + 1, kv, position + 2, (position + 3,)))
    result = plan(reads, writes, [conv, ssm, kv])
    assert len(result.fences) == 1
    assert result.copies == []
    assert len(result.roots) == 3


def test_a_slice_shares_the_root_it_is_a_slice_of():
    root = Window(torch.float16, (8, 4, 6))
    row = Window(torch.float16, (4, 6), byte_offset=2 * 24 * 3)
    assert choose_roots([root, row]) == ([root], {root: 0, row: 0})
    roots, _ = choose_roots([row], preferred=[root])
    assert roots == [root]


def test_permuted_and_expanded_windows_share_a_root():
    root = Window(torch.float16, (8, 4, 6))
    permuted = Window(torch.float16, (6, 8, 4), (1, 24, 6))
    expanded = Window(torch.float16, (8, 5, 4, 6), (24, 0, 6, 1))
    for windows in itertools.permutations((root, permuted, expanded)):
        roots, root_of = choose_roots(windows, preferred=[root])
        assert (roots, set(root_of.values())) == ([root], {0})
        roots, root_of = choose_roots(windows)
        assert roots in ([root], [permuted])
        assert set(root_of.values()) == {0}
        # A write to elements that are shown twice is left to whoever gets the window itself.
        roots, _ = choose_roots(windows, preferred=[root], written=[expanded, permuted])
        assert set(roots) == {root, expanded}


def test_slice_of_agrees_with_torch():
    root = Window(torch.int16, (4, 3, 6), byte_offset=8)
    buffer = torch.zeros(512, dtype=torch.uint8)
    view = root.regenerate(buffer)
    views = [view[1], view[1:3], view[:, 1], view[..., ::2], view[1:, 0].t(), view[2, 1, 3:5]]
    views += [view[:, 1:2, 3], view.permute(2, 0, 1)[1:5:3], view[3:4, 2:, :1]]
    views += [view, view.permute(2, 1, 0), view.transpose(0, 1).unsqueeze(1)]
    views += [view[:, :, None].expand(4, 3, 2, 6), view[1:, 2].t()[:, None].expand(6, 9, 3)]
    for part in views:
        window = Window.of(part)
        how = slice_of(window, root)
        assert how is not None, window
        rebuilt = view
        for dim, (start, length, step) in enumerate(how.ranges):
            rebuilt = rebuilt.as_strided(
                [length if d == dim else n for d, n in enumerate(rebuilt.shape)],
                [s * step if d == dim else s for d, s in enumerate(rebuilt.stride())],
                rebuilt.storage_offset() + start * rebuilt.stride(dim),
            )
        assert rebuilt.storage_offset() == part.storage_offset()
        for dim, extent, step in zip(how.dims, part.shape, part.stride(), strict=True):
            if dim is None:
                assert extent == 1 or step == 0
            else:
                assert (rebuilt.shape[dim], rebuilt.stride(dim)) == (extent, step)
    assert slice_of(Window(torch.int16, (7,), byte_offset=8), root) is None
    assert slice_of(Window(torch.float16, (6,), byte_offset=8), root) is None
