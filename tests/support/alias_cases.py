"""Functions that mutate and return aliases: peers' cases of PyTorch, restated for windows.

Grouped as in PyTorch's own tests: synthetic bases, input mutation and output aliasing, tensor
subclasses, and cases that only mixed dtypes have.
"""

from __future__ import annotations

import torch
from torch.nn.functional import batch_norm

from tests.support.oracle import Case, total


def rows():
    return (torch.tensor([1, 3]),)


def rows_and_values():
    return (torch.tensor([1, 3]), torch.randn(2, 4))


CASES: list[Case] = []


def case(windows, extra=None, storages="", exact=True, grad=True):
    def add(function):
        CASES.append(
            Case(function.__name__, function, windows, extra or (lambda: ()), storages, exact, grad)
        )
        return function

    return add


# --- the reason for the library ---


@case("AP", lambda: (torch.randn(8, 4),), exact=False)
def request_example(a, b, x):
    a.copy_(x.to(a.dtype))
    b.mul_(2)
    return total(a) + total(b)


@case("AF", rows_and_values, exact=False)
def token_write(a, b, slots, x):
    a[slots] = x.half()
    b[slots] = x + b[slots] * 2
    return total(a[slots]) + total(b[slots])


# --- synthetic bases and aliased, mutated inputs ---


@case("AI")
def mutation_seen_through_alias(a, b):
    a.add_(1)
    return b + 1


@case("AU")
def mutation_seen_through_bytes(a, b):
    a.add_(1)
    return b.clone()


@case("AI")
def output_views_the_other_alias(a, b):
    a.add_(1)
    return b[1:3]


@case("ARI", storages="010")
def unrelated_argument_in_the_middle(a, b, c):
    c.add_(1)
    return b + 1, c.view(-1), a


@case("AFIP", storages="0101")
def two_storages_interleaved(a, f, i, p):
    a.add_(1)
    return i + 1, f.unsqueeze(0), p + 1


@case("AF")
def detached_views(a, f):
    a, f = a.detach(), f.detach()
    a.mul_(2)
    f.add_(1)
    return a, f


@case("ABI")
def alias_everything(a, b, c):
    c.add_(1)
    x = c + 1
    return x.view(-1), b.view(-1), a[0]


@case("AF", exact=False)
def false_aliasing_adjacent(a, f):
    a.mul_(3)
    f.mul_(2)
    return total(a.clone()) + total(f.clone())


@case("SF", exact=False)
def gapped_and_dense(s, f):
    s.mul_(3)
    f.mul_(2)
    return total(s.clone()) + total(f)


@case("TA")
def transposed_alias(t, a):
    t.add_(1)
    a[0] = 2
    return t + 1


@case("HA")
def straddling(h, a):
    h.add_(1)
    a[6:].mul_(2)
    return h + 1, a + 1


@case("AI")
def each_output_its_own_input(a, i):
    return a[1:], i[1:]


@case("T")
def noncontiguous_mutation(t):
    t[:, 0].add_(1)
    return t + 1


@case("S")
def gaps_stay(s):
    s.fill_(2)


@case("AII")
def same_bytes_three_times(a, i, j):
    a.mul_(2)
    i.add_(1)
    return j + 1, a + 1


@case("AIR", lambda: (torch.ones(3),), storages="001")
def with_unrelated_arguments(a, i, w, plain):
    a.mul_(2)
    return i + 1, w + 1, plain + 1


# --- input mutation, output aliasing ---


@case("A")
def return_the_mutated_input(a):
    a.mul_(2)
    return a


@case("AFP", exact=False)
def mutate_two_of_three(a, f, p):
    a.mul_(2)
    p.add_(1)
    return total(f)


@case("AFT")
def mutate_and_return_views(a, f, t):
    f.add_(1)
    return a.view(-1), f.diagonal(), t.t()


@case("AF")
def views_only(a, f):
    return a[2], f.view(-1)[3:7], a[:, 1]


@case("AF")
def return_view_of_another_dtype(a, f):
    f.add_(1)
    return a.view(torch.int16), f.view(torch.uint8), a.view(torch.int64)


@case("AI")
def return_inputs_twice(a, i):
    a.add_(1)
    return a, i, a, a[0]


@case("AF")
def views_of_intermediates(a, f):
    x = a + 1
    y = f.clone()
    f.add_(1)
    return x.view(-1), x[0], y, y[1]


@case("A")
def mutate_a_clone_only(a):
    x = a.clone()
    x.add_(1)
    return x, a


@case("A")
def clone_then_mutate(a):
    x = a.clone()
    a.add_(1)
    return x, a.contiguous(), a.to(a.dtype)


@case("TA")
def copies_in_another_layout(t, a):
    x, y, z = t.contiguous(), t.clone(memory_format=torch.contiguous_format), t.reshape(-1)
    a.add_(1)
    return x.view(torch.uint8), y.view(-1), z.view(torch.uint8), t.flatten().view(torch.uint8)


@case("FP")
def statistics(mean, other):
    x = torch.ones(2, 4)
    batch_norm(x, mean[0], mean[1].abs_(), training=True)
    return other + 1


@case("AF", lambda: (torch.randn(4, requires_grad=True),))
def gradient_of_another_input(a, f, w):
    with torch.no_grad():
        a.add_(1)
    out = (w * f.detach().nan_to_num(1.0, 2.0, 3.0).clamp(-4, 4)).sum()
    return out * 1.0, a[0]


@case("AI")
def squeeze_and_expand(a, i):
    a[:1].squeeze(0).add_(1)
    return i.unsqueeze(0).expand(2, 4, 4) + 1, a[0].expand(3, 4)


@case("AFI")
def multi_output_views(a, f, i):
    x, y = a.split(4)
    x.add_(1)
    u = f.unbind(0)
    u[1].mul_(2)
    return y, u[0], i.chunk(2)[1]


# --- partial writes of every kind ---


@case("AI", rows_and_values)
def index_put(a, i, slots, x):
    a[slots] = x.half()
    a[:, 1][slots] = 3
    return i + 1


@case("FI", rows_and_values, storages="00")
def index_put_accumulate(f, i, slots, x):
    f.index_put_((slots,), x, accumulate=True)
    i.index_put_((slots, slots), torch.ones(2, dtype=torch.int32), accumulate=True)
    return f + 1


@case("AI", lambda: (torch.tensor([1, 1, 3]), torch.randn(3, 4)))
def gather_update_scatter_duplicates(a, i, slots, x):
    a[slots] = a[slots] * 2
    i[slots[:2]] = i[slots[:2]] + 1
    return i + 1


@case("FP", rows_and_values)
def index_copy_add_fill(f, p, slots, x):
    f.index_copy_(0, slots, x)
    f.index_add_(0, slots, x)
    p.index_fill_(1, slots, 2.0)
    return f + 1, p + 1


@case("FH", rows_and_values)
def scatter_kinds(f, h, slots, x):
    f.scatter_(0, slots[:, None].expand(2, 4), x)
    f.scatter_add_(0, slots[:, None].expand(2, 4), x)
    f.scatter_reduce_(0, slots[:, None].expand(2, 4), x, "amax")
    h.scatter_(1, slots[None], 5)
    return f + 1


@case("AI")
def masked_writes(a, i):
    a.masked_fill_(a > 0, 3)
    i.masked_scatter_(i > 0, torch.arange(16, dtype=torch.int32))
    a[a < -1] = 2
    return a + 1


@case("AL")
def bool_window(a, flags):
    a[:4].masked_fill_(flags.view(4, 4), 1)
    flags.logical_not_()
    flags[1] = True
    return flags.clone(), a + 1


@case("AF")
def slices_and_selects(a, f):
    a[2:5, 1:3].copy_(f[:3, :2])
    a[1].zero_()
    f[::2, 1] = 4
    f.view(-1)[3:9].fill_(2)
    return a + 1


@case("AFI")
def foreach(a, f, i):
    torch._foreach_add_([a, f], 1.0)
    torch._foreach_mul_([a[1], f[2]], 2.0)
    return i + 1


@case("AF", lambda: (torch.randn(4, 4), torch.randn(4, 4)))
def out_arguments(a, f, x, y):
    torch.add(x, y, out=f)
    torch.mul(f, 2, out=f)
    return a + 1, f + 1


@case("AI")
def several_writes_in_a_row(a, i):
    a.add_(1)
    a[0] = 2
    a.mul_(2)
    i.add_(3)
    i[1] = 7
    a.sub_(1)
    return a + i.to(a.dtype)[0, 0]


@case("GQ", rows_and_values)
def fp8_over_uint8(g, q, slots, x):
    g[slots] = x.to(torch.float8_e4m3fn).view(torch.uint8)
    value = q[slots].float()
    g[0] = 7
    return value, q.float() + 1


@case("AN")
def index_by_a_window(a, n):
    n.fill_(3)
    n.add_(2)
    a[n % 8] = 2
    return a + 1


# --- values kept across writes ---


@case("AIF")
def old_values_used_after_write(a, i, f):
    old = a * 2
    kept = i.clone()
    view = a[1]
    i.add_(1)
    f.copy_(old[:4].float())
    return old + a, kept, view + 1


@case("AI")
def copy_between_aliases(a, i):
    a[4:].copy_(a[:4].clone())
    i[0] = i[3]
    return a + 1


@case("AB", grad=False)
def copy_between_same_windows(a, b):
    a.copy_(b)
    b.add_(1)
    return a + 1


@case("AA", storages="01")
def copy_between_storages(a, b):
    a.copy_(b)
    b.add_(1)
    return a + 1, b


@case("AF")
def swap(a, f):
    x = a[:4].clone()
    a[:4] = f.half()
    f.copy_(x.float())
    return x


# --- windows that are odd ---


@case("ZF")
def empty_window(z, f):
    z.add_(1)
    f.mul_(2)
    return z, z + 1, f[0]


@case("EA")
def expanded_window(e, a):
    a.copy_(e)
    return e + 1, e[3]


@case("NU")
def scalar_window(n, u):
    n.fill_(5)
    return u.clone(), n + 1


@case("CR")
def complex_over_real(c, r):
    c.mul_(2)
    r[0].add_(1)
    return torch.view_as_real(c) + 1, c.real, c.imag


@case("DU")
def float64_over_bytes(d, u):
    d.fill_(1.5)
    u[160:168] = 0
    return d + 1


# --- mixed dtypes, which stock torch refuses or gets wrong ---


@case("PX")
def same_bytes_disjoint_elements(p, x):
    p.add_(1)
    x.mul_(2)
    return p + 1, x + 1


@case("AF")
def disjoint_bytes_overlapping_elements(a, f):
    a.add_(1)
    f.mul_(2)
    return a + 1, f + 1


@case("HA")
def nan_payload_through_integers(h, a):
    h[0] = 0x7C01
    return a.clone(), a.view(torch.int16) + 1


@case("FU")
def write_floats_read_bytes(f, u):
    f.fill_(1.0)
    return u[64:68] + 1


@case("AFIHUTSCPZ")
def many_windows(a, f, i, h, u, t, s, c, p, z):
    a[1] = 2
    f.add_(1)
    i[2].mul_(3)
    h[1:3].sub_(1)
    u[5] = 9
    t[1].add_(1)
    s[0] = 4
    c[1].mul_(2)
    p[2].fill_(3)
    return a + 1, f + 1, h + 1, u.clone(), t + 1


@case("UA")
def raw_base_and_window_mutated(u, a):
    a.fill_(1)
    u[3] = 0
    u[60:70].add_(1)
    return a + 1
