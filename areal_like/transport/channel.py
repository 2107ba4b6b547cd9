"""Channels between the processes of a run: one Hub (ROUTER), any number of Peers (DEALER).

A channel provides names, registration, liveness, bounds and deadlines. Delivery is at most once: messages that must
arrive are acknowledged and resent by the code that sends them, which is notified when to resend. Encoding is in
encoding.py.

Registration. A Peer sends Hello, with the token of its name (credentials.py). The Hub answers Welcome, whose
`incarnation` identifies this registration and is secret: each message of the Peer contains it, so the registration
continues when a broken connection is made again. As long as the incarnation stays the same, the Hub knows the Peer. A
Welcome with another one means that the Hub has no record of earlier messages (it restarted, or removed the Peer as
lost); it is passed to the caller.

Liveness. A Peer sends a Heartbeat every `heartbeat_s` from a separate task. The Hub answers each one with a Heartbeat
in state "known" or "stranger"; after "stranger" the Peer sends Hello again. Time during which a side did not listen
itself does not count as the other side's silence (ListeningClock). The kernel's TCP keepalive detects a lost machine.

Bounds. Each message contains the number of bytes that the Peer has sent so far. The Hub reports the number that it has
read in its heartbeats, and whenever half a window was read. A Peer sends no more than WINDOW_BYTES ahead of that.

Waits: Hub.receive waits for the socket, woken by its descriptor. Peer.receive waits for the inbox, filled by the
descriptor's callback. Peer.send waits for room, woken by the descriptor. Peer._beat sleeps heartbeat_s.

The two ends are in hub.py and peer.py, the sockets below them in sockets.py; import them from this module.
"""

from areal_like.transport.hub import Hub, PeerInfo
from areal_like.transport.peer import Peer
from areal_like.transport.sockets import QUEUE_MESSAGES

__all__ = ["QUEUE_MESSAGES", "Hub", "Peer", "PeerInfo"]
