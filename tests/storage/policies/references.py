# SPDX-License-Identifier: Apache-2.0
"""The policies again, slow and plain, from their papers: lists and sorting, all keys free to leave."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Reference(ABC):
    """A cache of `capacity` keys."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def hit(self, key: int) -> None: ...

    @abstractmethod
    def miss(self, key: int) -> int | None:
        """Lets the key in; the one that had to leave."""

    @abstractmethod
    def drop(self, key: int) -> None:
        """The key goes without a trace."""

    @abstractmethod
    def keys(self) -> set[int]: ...


class Recency(Reference):
    """LRU, FIFO and MRU."""

    def __init__(self, capacity: int, victim: int = 0, moves: bool = True) -> None:
        super().__init__(capacity)
        self.order: list[int] = []
        self.victim, self.moves = victim, moves

    def hit(self, key: int) -> None:
        if self.moves:
            self.order.remove(key)
            self.order.append(key)

    def miss(self, key: int) -> int | None:
        gone = self.order.pop(self.victim) if len(self.order) == self.capacity else None
        self.order.append(key)
        return gone

    def drop(self, key: int) -> None:
        self.order.remove(key)

    def keys(self) -> set[int]:
        return set(self.order)


class Frequency(Reference):
    """LFU-DA: sorts all keys for each victim."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.age = self.clock = 0
        self.rows: dict[int, tuple[int, int, int]] = {}
        """Priority, time of the last use, uses."""

    def use(self, key: int, uses: int) -> None:
        self.clock += 1
        self.rows[key] = (self.age + uses, self.clock, uses)

    def hit(self, key: int) -> None:
        self.use(key, self.rows[key][2] + 1)

    def miss(self, key: int) -> int | None:
        gone = None
        if len(self.rows) == self.capacity:
            gone = sorted(self.rows, key=lambda key: self.rows[key])[0]
            self.age = self.rows.pop(gone)[0]
        self.use(key, 1)
        return gone

    def drop(self, key: int) -> None:
        del self.rows[key]

    def keys(self) -> set[int]:
        return set(self.rows)


class ThreeQueues(Reference):
    """S3-FIFO, as in Algorithm 1 of the paper: the newest at the front of each list."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.freq: dict[int, int] = {}
        self.small_size = max(1, round(capacity / 10))
        self.ghost_size = max(1, capacity - self.small_size)

    def hit(self, key: int) -> None:
        self.freq[key] = min(self.freq[key] + 1, 3)

    def miss(self, key: int) -> int | None:
        gone = None
        if len(self.small) + len(self.main) == self.capacity:
            while gone is None:
                of_small = len(self.small) >= self.small_size
                gone = self.evict_small() if (of_small and self.small) or not self.main else self.evict_main()
        if key in self.ghost:
            self.ghost.remove(key)
            self.main.insert(0, key)
        else:
            self.small.insert(0, key)
        self.freq[key] = 0
        return gone

    def evict_small(self) -> int | None:
        while self.small:
            tail = self.small.pop()
            if self.freq[tail] > 1:
                self.main.insert(0, tail)
                self.freq[tail] = 0
            else:
                self.ghost = [tail, *self.ghost][: self.ghost_size]
                return tail
        return None

    def evict_main(self) -> int | None:
        while self.main:
            tail = self.main.pop()
            if self.freq[tail] == 0:
                return tail
            self.freq[tail] -= 1
            self.main.insert(0, tail)
        return None

    def drop(self, key: int) -> None:
        (self.small if key in self.small else self.main).remove(key)

    def keys(self) -> set[int]:
        return {*self.small, *self.main}


class Textbook(Reference):
    """ARC by the cases of Figure 4 of the paper (the least recently used at the front of each list), but for
    the order of two steps: room is made before the target `p` is moved."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def hit(self, key: int) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)
        self.t2.append(key)

    def miss(self, key: int) -> int | None:
        c = self.capacity
        gone = self.replace() if len(self.t1) + len(self.t2) == c else None
        if key in self.b1:
            self.p = min(c, self.p + max(1.0, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            self.t2.append(key)
        else:
            if len(self.t1) + len(self.b1) == c:
                self.b1.pop(0)
            elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * c:
                self.b2.pop(0)
            self.t1.append(key)
        return gone

    def replace(self) -> int:
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            self.b1.append(self.t1.pop(0))
            return self.b1[-1]
        self.b2.append(self.t2.pop(0))
        return self.b2[-1]

    def drop(self, key: int) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)

    def keys(self) -> set[int]:
        return {*self.t1, *self.t2}
