/* Links between network namespaces: carries IP packets with latency, a rate, bounded buffers, loss.

     namespace a: eth0 (tun) ─► a's way out (rate, buffer) ─► latency, loss, cuts
                                ─► b's way in (rate, buffer) ─► eth0 (tun) :namespace b

   Every host has one way out and one way in, so what it sends to all shares a rate, and so does what
   all send to it. A packet goes through both at once where nothing waits (the second begins with its
   first bit), so a link of its own costs it one time on the wire and the latency.

     relay carry OWNER NAMESPACE...     OWNER is a pid; host k is 10.77.0.(k+1), k from 0
     relay remove NAMESPACE...          ends what runs there, and takes the namespaces away

   A line on stdin is a command, each answered by one line ("ok", numbers, or "error WHY"):

     rate K BITS_PER_S BYTES            both ways of host k, and the room of each
     path A B LATENCY_NS LOSS SEED      from a to b; loss is a share of packets
     cut A B, mend A B                  what is on the way of a cut path is lost, too
     counts A B                         came, delivered, their bytes, lost, no room, cut
     host K                             ns that the way out and the way in were busy
     late                               packets 1 ms or more behind their time, and the most ns

   At the end of stdin, or of the owner, namespaces are removed. Packets keep the segments that the
   kernel would have a network card cut (vnet header), unless a path loses packets: then each is one.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_HOSTS 250
#define MOST_PACKET (65536 + 512)
#define BATCH 64 /* packets of one host before others have their turn */
#define LATE_NS 1000000
#define FOLDER "/run/netns/"

typedef struct {
  int64_t latency;
  double loss;
  uint64_t random;
  int cut;
  uint64_t came, delivered, bytes, lost, full, cut_off;
} Path;

typedef struct {
  int tun;
  double ns_per_byte;
  int64_t room; /* bytes that may wait */
  int64_t out_free, in_free;
  uint64_t out_busy, in_busy;
} Host;

typedef struct {
  int64_t due;
  uint64_t number; /* equal times keep their order */
  int from, to, entering;
  size_t size;
  int64_t wire; /* bytes on the wire: headers of all segments */
  unsigned char data[];
} Packet;

static Host hosts[MOST_HOSTS];
static Path paths[MOST_HOSTS][MOST_HOSTS];
static int n;
static Packet **heap;
static size_t heaped, heap_room;
static uint64_t numbered, late;
static int64_t latest;
static int offloaded = -1;

static void die(const char *what) {
  fprintf(stderr, "relay: %s: %s\n", what, strerror(errno));
  exit(1);
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* Packets by time */

static int before(const Packet *a, const Packet *b) {
  return a->due != b->due ? a->due < b->due : a->number < b->number;
}

static void push(Packet *p) {
  if (heaped == heap_room) {
    heap_room = heap_room ? 2 * heap_room : 1024;
    heap = realloc(heap, heap_room * sizeof *heap);
    if (!heap) die("memory");
  }
  p->number = numbered++;
  size_t k = heaped++;
  while (k && before(p, heap[(k - 1) / 2])) {
    heap[k] = heap[(k - 1) / 2];
    k = (k - 1) / 2;
  }
  heap[k] = p;
}

static Packet *pop(void) {
  Packet *first = heap[0], *last = heap[--heaped];
  size_t k = 0;
  for (;;) {
    size_t child = 2 * k + 1;
    if (child >= heaped) break;
    if (child + 1 < heaped && before(heap[child + 1], heap[child])) child++;
    if (!before(heap[child], last)) break;
    heap[k] = heap[child];
    k = child;
  }
  if (heaped) heap[k] = last;
  return first;
}

/* Links */

static double uniform(uint64_t *state) { /* splitmix64 */
  uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

/* When a packet is through a way that is free from a time on, or -1 if it has no room. */
static int64_t pass(const Host *h, int64_t *free_at, uint64_t *busy, int64_t now, int64_t bytes) {
  int64_t begin = *free_at > now ? *free_at : now;
  if (h->ns_per_byte * h->room < (double)(begin - now)) return -1;
  int64_t takes = (int64_t)(h->ns_per_byte * bytes);
  *free_at = begin + takes;
  *busy += takes;
  return begin;
}

static int receiver_of(const unsigned char *ip, size_t size) {
  if (size < 20 || ip[0] >> 4 != 4) return -1;
  if (ip[16] != 10 || ip[17] != 77 || ip[18] || !ip[19] || ip[19] > n) return -1;
  return ip[19] - 1;
}

static int64_t wire_bytes(const struct virtio_net_hdr *head, size_t size) {
  if (head->gso_type == VIRTIO_NET_HDR_GSO_NONE || !head->gso_size) return (int64_t)size;
  size_t headers = head->hdr_len ? head->hdr_len : 40;
  size_t content = size > headers ? size - headers : 0;
  size_t segments = (content + head->gso_size - 1) / head->gso_size;
  return (int64_t)(size + (segments ? segments - 1 : 0) * headers);
}

/* A host has sent something. */
static void enter(int from, const unsigned char *data, size_t size, int64_t now) {
  const struct virtio_net_hdr *head = (const void *)data;
  int to = receiver_of(data + sizeof *head, size - sizeof *head);
  if (to < 0) return;
  Path *path = &paths[from][to];
  path->came++;
  if (path->cut) {
    path->cut_off++;
    return;
  }
  int64_t wire = wire_bytes(head, size - sizeof *head);
  Host *h = &hosts[from];
  int64_t begin = pass(h, &h->out_free, &h->out_busy, now, wire);
  if (begin < 0) {
    path->full++;
    return;
  }
  if (path->loss > 0 && uniform(&path->random) < path->loss) {
    path->lost++;
    return;
  }
  Packet *p = malloc(sizeof *p + size);
  if (!p) die("memory");
  *p = (Packet){.due = begin + path->latency, .from = from, .to = to, .entering = 1};
  p->size = size;
  p->wire = wire;
  memcpy(p->data, data, size);
  push(p);
}

/* The first bit of a packet is there, or all of it. */
static void arrive(Packet *p, int64_t now) {
  Path *path = &paths[p->from][p->to];
  Host *h = &hosts[p->to];
  if (path->cut) {
    path->cut_off++;
  } else if (p->entering) {
    int64_t begin = pass(h, &h->in_free, &h->in_busy, p->due, p->wire);
    if (begin >= 0) {
      p->due = begin + (int64_t)(h->ns_per_byte * p->wire);
      p->entering = 0;
      push(p);
      return;
    }
    path->full++;
  } else {
    if (now - p->due >= LATE_NS) late++;
    if (now - p->due > latest) latest = now - p->due;
    if (write(h->tun, p->data, p->size) == (ssize_t)p->size) {
      path->delivered++;
      path->bytes += (uint64_t)p->wire;
    } else {
      path->full++; /* the namespace has no room */
    }
  }
  free(p);
}

/* Namespaces */

static int open_namespace(const char *name) {
  char where[256];
  snprintf(where, sizeof where, FOLDER "%s", name);
  return open(where, O_RDONLY | O_CLOEXEC);
}

static int open_tun(const char *name) {
  int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), there = open_namespace(name);
  if (home < 0 || there < 0 || setns(there, CLONE_NEWNET)) die(name);
  int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (tun < 0) die("/dev/net/tun");
  struct ifreq ask = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
  strcpy(ask.ifr_name, "eth0");
  if (ioctl(tun, TUNSETIFF, &ask)) die("TUNSETIFF");
  if (setns(home, CLONE_NEWNET)) die("back from a namespace");
  close(home);
  close(there);
  return tun;
}

/* Large packets, or none if any path loses packets: else a loss would be of up to 45 at once. */
static void set_offload(void) {
  int wanted = 1;
  for (int a = 0; a < n; a++)
    for (int b = 0; b < n; b++)
      if (paths[a][b].loss > 0) wanted = 0;
  if (wanted == offloaded) return;
  offloaded = wanted;
  for (int k = 0; k < n; k++)
    if (ioctl(hosts[k].tun, TUNSETOFFLOAD, wanted ? TUN_F_CSUM | TUN_F_TSO4 : 0)) die("offload");
}

/* Kill what lives in a namespace; how many there were. */
static int strike(const struct stat *wanted) {
  int found = 0;
  DIR *all = opendir("/proc");
  if (!all) return 0;
  for (struct dirent *entry; (entry = readdir(all));) {
    char where[300];
    struct stat there;
    pid_t pid = atoi(entry->d_name);
    if (pid <= 1 || pid == getpid()) continue;
    snprintf(where, sizeof where, "/proc/%d/ns/net", pid);
    if (stat(where, &there) || there.st_ino != wanted->st_ino || there.st_dev != wanted->st_dev)
      continue;
    found++;
    kill(pid, SIGKILL);
  }
  closedir(all);
  return found;
}

static void take_away(const char *name) {
  char where[256];
  struct stat self, home;
  snprintf(where, sizeof where, FOLDER "%s", name);
  /* Where a mount is gone the file is an ordinary one, and nobody lives in it. */
  if (!stat(where, &self) && !stat("/proc/self/ns/net", &home) && self.st_dev == home.st_dev &&
      self.st_ino != home.st_ino)
    for (int k = 0; k < 200 && strike(&self); k++) usleep(5000);
  while (!umount2(where, MNT_DETACH)) {}
  unlink(where);
}

/* Commands */

static int known(int k) { return k >= 0 && k < n; }

static void obey(const char *line) {
  char word[16];
  int a = -1, b = -1, used = 0;
  if (sscanf(line, "%15s%n", word, &used) != 1) return;
  const char *rest = line + used;
  double x, y;
  uint64_t seed;
  int64_t ns;
  if (!strcmp(word, "rate") && sscanf(rest, "%d %lf %lf", &a, &x, &y) == 3 && known(a)) {
    hosts[a].ns_per_byte = 8e9 / x;
    hosts[a].room = (int64_t)y;
  } else if (!strcmp(word, "path") &&
             sscanf(rest, "%d %d %" SCNd64 " %lf %" SCNu64, &a, &b, &ns, &x, &seed) == 5 &&
             known(a) && known(b)) {
    paths[a][b].latency = ns;
    paths[a][b].loss = x;
    paths[a][b].random = seed;
    set_offload();
  } else if ((!strcmp(word, "cut") || !strcmp(word, "mend")) &&
             sscanf(rest, "%d %d", &a, &b) == 2 && known(a) && known(b)) {
    paths[a][b].cut = word[0] == 'c';
  } else if (!strcmp(word, "counts") && sscanf(rest, "%d %d", &a, &b) == 2 && known(a) &&
             known(b)) {
    Path *p = &paths[a][b];
    printf("%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", p->came,
           p->delivered, p->bytes, p->lost, p->full, p->cut_off);
    return;
  } else if (!strcmp(word, "host") && sscanf(rest, "%d", &a) == 1 && known(a)) {
    printf("%" PRIu64 " %" PRIu64 "\n", hosts[a].out_busy, hosts[a].in_busy);
    return;
  } else if (!strcmp(word, "late")) {
    printf("%" PRIu64 " %" PRId64 "\n", late, latest);
    return;
  } else {
    printf("error %s\n", line);
    return;
  }
  printf("ok\n");
}

/* Whole lines of what has come on stdin; 0 at its end. */
static int listen_to_stdin(void) {
  static char text[4096];
  static size_t have;
  ssize_t got = read(0, text + have, sizeof text - 1 - have);
  if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
  have += (size_t)got;
  for (char *end; (end = memchr(text, '\n', have));) {
    *end = 0;
    obey(text);
    have -= (size_t)(end + 1 - text);
    memmove(text, end + 1, have);
  }
  fflush(stdout);
  return have < sizeof text - 1;
}

static void carry(int owner) {
  static _Alignas(16) unsigned char data[MOST_PACKET];
  struct pollfd fds[MOST_HOSTS + 2];
  for (int k = 0; k < n; k++) fds[k] = (struct pollfd){hosts[k].tun, POLLIN, 0};
  fds[n] = (struct pollfd){0, POLLIN, 0};
  fds[n + 1] = (struct pollfd){owner, POLLIN, 0};
  for (;;) {
    int64_t now = now_ns();
    while (heaped && heap[0]->due <= now) arrive(pop(), now);
    int64_t left = heaped ? heap[0]->due - now : 1000000000;
    struct timespec wait = {left / 1000000000, left % 1000000000};
    if (ppoll(fds, (nfds_t)n + 2, &wait, NULL) < 0 && errno != EINTR) die("ppoll");
    if (fds[n + 1].revents) return;
    if (fds[n].revents && !listen_to_stdin()) return;
    for (int k = 0; k < n; k++) {
      if (!fds[k].revents) continue;
      now = now_ns();
      for (int j = 0; j < BATCH; j++) {
        ssize_t size = read(hosts[k].tun, data, sizeof data);
        if (size <= (ssize_t)sizeof(struct virtio_net_hdr)) break;
        enter(k, data, (size_t)size, now);
      }
    }
  }
}

int main(int count, char **words) {
  if (count >= 3 && !strcmp(words[1], "remove")) {
    for (int k = 2; k < count; k++) take_away(words[k]);
    return 0;
  }
  if (count < 4 || strcmp(words[1], "carry") || count - 3 > MOST_HOSTS) {
    fprintf(stderr, "relay carry OWNER NAMESPACE... | relay remove NAMESPACE...\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN); /* the owner hears nothing any more, and its end is seen */
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
  prctl(PR_SET_TIMERSLACK, 1);
  setpriority(PRIO_PROCESS, 0, -20);
  /* Before all that computes on the hosts, as a network is; it needs some hundredths of a core. */
  sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
  int owner = (int)syscall(SYS_pidfd_open, atoi(words[2]), 0);
  n = count - 3;
  if (owner >= 0) {
    for (int k = 0; k < n; k++) {
      hosts[k] = (Host){.tun = open_tun(words[3 + k]), .ns_per_byte = 0, .room = 1 << 20};
      for (int j = 0; j < n; j++) paths[k][j].random = (uint64_t)(k * n + j);
    }
    set_offload();
    printf("ok\n");
    fflush(stdout);
    carry(owner);
    for (int k = 0; k < n; k++) close(hosts[k].tun);
  }
  for (int k = 3; k < count; k++) take_away(words[k]);
  return 0;
}
