# SPDX-License-Identifier: Apache-2.0
"""Runs a rendered pod as processes of this machine: no cluster, no root, no images.

`commands` is what a user calls. It checks, lays out the pod's folders (`volumes`, `pod`, `paths`) and leaves
a `supervisor` behind, which stands in for the kubelet: it starts the containers, probes them, starts them
again with back-off and stops them. `state` is the file that both read. `procfs` and `sweep` see to it that
nothing stays.

What differs from a pod: the image is the Python that runs us, there are no namespaces and no limits of
resources, mounts are folders to which all paths are rewritten, /dev/shm is the machine's own, and `preStop`
hooks are left out, since they only wait for load balancers.
"""
