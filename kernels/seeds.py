"""Derive the seed of each use of randomness from a trial's seed; the result is the same on every machine."""

_MASK = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """Derive a seed below 2^63 from parts such as (trial seed, step, micro-batch, rank, layer, slot).

    The result depends on the order and the number of the parts. One part after the other is combined with the result so
    far by SplitMix64's finalizer, a bijection on 64 bits in which every output bit depends on every input bit. So
    neighbouring steps and layers get unrelated seeds.
    """
    state = len(parts)
    for part in parts:
        state = _mix(state ^ _mix((part + 0x9E3779B97F4A7C15) & _MASK))
    return state >> 1


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
