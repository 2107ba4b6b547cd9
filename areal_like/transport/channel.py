"""How processes of a run talk: one Hub (ROUTER), any number of Peers (DEALER).

Owns: names, registration, liveness, bounds, deadlines. Refuses: leases, credits and resending (their owners'), encoding
(encoding.py). Delivery is at most once: what must arrive is acknowledged and resent by its owner, who is notified when
to.

Registration. A Peer says Hello, with the token of its name (credentials.py); the Hub answers Welcome, whose
`incarnation` names this registration and is secret: each message of the Peer carries it, so that the registration goes
on when the connection breaks and is made again. As long as it stays the same the Hub knows the Peer; a Welcome with
another one means that the Hub (restarted, or having forgotten the Peer as lost) knows nothing of earlier messages, and
is passed up.

Liveness. A Peer sends a Heartbeat every `heartbeat_s` from a task of its own; the Hub answers each one with a Heartbeat
in state "known" or "stranger". A stranger says Hello again. Neither side judges the other's silence by time during
which it did not listen itself (PatienceClock). A machine that is gone is noticed by the kernel's TCP keepalive.

Bounds. Each message says how many bytes the Peer has sent with it; the Hub reports what it has read in its heartbeats,
and whenever half a window was read. A Peer sends no more than WINDOW_BYTES ahead of that.

Map of the waits: Hub.receive waits for the socket, woken by its descriptor. Peer.receive waits for the inbox, filled by
the descriptor's callback. Peer.send waits for room, woken by the descriptor. Peer._beat sleeps heartbeat_s.

The two ends live in hub.py and peer.py, the sockets under them in sockets.py; import them from here.
"""

from areal_like.transport.hub import Hub, PeerInfo
from areal_like.transport.peer import Peer
from areal_like.transport.sockets import QUEUE_MESSAGES

__all__ = ["QUEUE_MESSAGES", "Hub", "Peer", "PeerInfo"]
