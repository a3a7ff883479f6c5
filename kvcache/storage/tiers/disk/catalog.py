# SPDX-License-Identifier: Apache-2.0
"""The index: every object in the directories, whoever wrote it, and the order in which they leave.

What is found on the disk is usable at once, by its name alone. It gets its place in the order later, when the
files were asked for their last use: before anything leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvcache.storage.policies import AdmissionPolicy, EvictionPolicy
from kvcache.storage.policies.base import K
from kvcache.storage.tier import NO_PARENT
from kvcache.storage.tiers.disk.names import KEY_BYTES, ObjectName, sum_of_files
from kvcache.tokens.keys import CacheEngineKey


@dataclass(slots=True, eq=False)
class Entry:
    """One object."""

    name: ObjectName
    directory: int
    """Which of the directories it lies in."""
    touched: float
    """Its last use that is known here, in seconds of the epoch."""


class Catalog:
    """Objects by the 36 bytes of their keys. Not thread-safe.

    Args:
        policy: which one leaves first.
        admission: which one is let in; all if None.
        own: a key of this process's namespace and rank.
        note: called with the key of each object of those that gets a place or goes, and whether it is there.
    """

    def __init__(
        self,
        policy: EvictionPolicy[bytes],
        admission: AdmissionPolicy[bytes] | None,
        own: CacheEngineKey,
        note: Callable[[bytes, bool], None] = lambda key, stored: None,
    ) -> None:
        self._note = note
        self._policy = policy
        self._admission = admission
        self._own = own.to_bytes()[16:34]
        self._entries: dict[bytes, Entry] = {}
        self._found: dict[int, dict[bytes, bytes]] = {}
        """Directory to key and name of what has no place in the order yet."""
        self._children: Counter[bytes] = Counter()
        """Key of a parent, there or not, to its children that are there."""
        self._tenants: Counter[bytes] = Counter()
        """Tenant to the bytes of its objects of this process's namespace and rank."""
        self._bytes: Counter[int] = Counter()
        """By directory."""

    def __len__(self) -> int:
        return len(self._entries) + sum(map(len, self._found.values()))

    def get(self, key: bytes) -> Entry | None:
        """The object, if it is there. One that was found is the newest from now on."""
        entry = self._entries.get(key)
        if entry is not None or not self._found:
            return entry
        for directory, found in self._found.items():
            raw = found.get(key)
            if raw is not None:
                self._place(directory, key, 0.0)
                return self._entries[key]
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self._bytes.values())

    def bytes_in(self, directory: int) -> int:
        """Bytes of the files in a directory."""
        return self._bytes[directory]

    def is_own(self, key: bytes) -> bool:
        """Whether it is of this process's namespace and rank."""
        return key[16:34] == self._own

    def tenant_bytes(self, tenant: bytes) -> int:
        """Bytes of the tenant's objects of this process's namespace and rank, once all have their places."""
        return self._tenants[tenant]

    def add(self, name: ObjectName, directory: int, touched: float) -> None:
        """Adds an object as the newest, if it is not there."""
        key = name.key_bytes
        if self.get(key) is None:
            self._bytes[directory] += name.file_bytes
            self._insert(Entry(name, directory, touched))

    def take_in(self, directory: int, raws: list[bytes]) -> list[ObjectName]:
        """Makes the index of a directory say what was found there.

        Returns:
            Objects that another directory holds too.
        """
        listed = {raw[:KEY_BYTES]: raw for raw in raws}
        for key in [
            key for key, e in self._entries.items() if e.directory == directory and key not in listed
        ]:
            self.pop(key)
        others = [found for other, found in self._found.items() if other != directory]
        self._bytes[directory] -= sum_of_files([*self._found.pop(directory, {}).values()])
        twins = []
        for key in [key for key in listed if key in self._entries] if self._entries else ():
            raw = listed.pop(key)
            if self._entries[key].directory != directory:
                twins.append(ObjectName(raw))
        for found in others:
            twins += [ObjectName(listed.pop(key)) for key in found if key in listed]
        self._found[directory] = listed
        self._bytes[directory] += sum_of_files([*listed.values()])
        self._forget_empty()
        return twins

    def found(self) -> list[tuple[int, bytes]]:
        """Directory and name of what has no place in the order yet."""
        return [(directory, raw) for directory, found in self._found.items() for raw in found.values()]

    @property
    def has_found(self) -> bool:
        return bool(self._found)

    def rank(self, used: Mapping[bytes, float]) -> None:
        """Gives what was found its place.

        Args:
            used: by key, the oldest first, the last use in seconds of the epoch.
        """
        for key, when in used.items():
            for directory, found in list(self._found.items()):
                if key in found:
                    self._place(directory, key, when)

    def used(self, key: bytes) -> None:
        """A request found the object. Of a chain the end is told first, so that the start leaves last."""
        if self._admission is not None:
            self._admission.seen(key)
        self.touch(key)

    def touch(self, key: bytes) -> None:
        """Somebody uses the object."""
        if self.get(key) is not None:
            self._policy.touch(key)

    def pop(self, key: bytes) -> Entry | None:
        """Takes the object out; None if it is not there."""
        entry = self.get(key)
        if entry is not None:
            self._policy.remove(key)
            self._forget(entry)
        return entry

    def candidate(self, may_leave: Callable[[Entry], bool]) -> Entry | None:
        """Whose turn it is to leave; it stays until `evict`. None if nothing may.

        What others continue does not leave before them: a chain is given up from its end.
        """
        key = self._policy.candidate(lambda key: key not in self._children and may_leave(self._entries[key]))
        return None if key is None else self._entries[key]

    def evict(self, candidate: Entry) -> None:
        """It is gone, to make room."""
        self._policy.evict(candidate.name.key_bytes)
        self._forget(candidate)

    def offered(self, key: bytes) -> None:
        """A request computed the object."""
        if self._admission is not None:
            self._admission.seen(key)

    def admits(self, key: bytes, candidate: Entry | None) -> bool:
        """Whether to let an object in that was offered, if need be in the candidate's place."""
        victim = None if candidate is None else candidate.name.key_bytes
        return self._admission is None or self._admission.admits(key, victim)

    def set_policies(self, policy: EvictionPolicy[bytes], admission: AdmissionPolicy[bytes] | None) -> None:
        """New policies, which know nothing yet but in which order the objects were used last."""
        for entry in sorted(self._entries.values(), key=lambda entry: entry.touched):
            policy.admit(entry.name.key_bytes)
        self._policy, self._admission = policy, admission

    def drop_directory(self, directory: int) -> None:
        """Takes out all objects of a directory."""
        self.take_in(directory, [])

    def _place(self, directory: int, key: bytes, touched: float) -> None:
        name = ObjectName(self._found[directory].pop(key))
        self._forget_empty()
        self._insert(Entry(name, directory, touched))

    def _insert(self, entry: Entry) -> None:
        name = entry.name
        key = name.key_bytes
        self._entries[key] = entry
        if _has_parent(name):
            self._children[name.parent_key_bytes] += 1
        if self.is_own(key):
            self._tenants[name.tenant] += name.file_bytes
            self._note(key, True)
        self._policy.admit(key)

    def _forget(self, entry: Entry) -> None:
        name = entry.name
        del self._entries[name.key_bytes]
        self._bytes[entry.directory] -= name.file_bytes
        if _has_parent(name):
            parent = name.parent_key_bytes
            _take(self._children, parent, 1)
            if parent not in self._children and parent in self._entries:
                self._policy.became_leaf(parent)
        if self.is_own(name.key_bytes):
            _take(self._tenants, name.tenant, name.file_bytes)
            self._note(name.key_bytes, False)

    def _forget_empty(self) -> None:
        if not all(self._found.values()):
            self._found = {directory: found for directory, found in self._found.items() if found}


def _has_parent(name: ObjectName) -> bool:
    return name.parent not in (NO_PARENT, name.raw[:16])


def _take(counter: Counter[K], key: K, amount: int) -> None:
    counter[key] -= amount
    if not counter[key]:
        del counter[key]
