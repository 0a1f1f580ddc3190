// A switch between hosts that are network namespaces: delays, limits and loses packets.
//
//     link DELAY_US GBIT_PER_S LOSS SEED NAMESPACE..
//
// Makes the TUN device "link" in each namespace, a file such as /proc/PID/ns/net, prints "ready",
// and then passes packets between the devices until its input ends. Host i has the address
// 10.231.0.(i + 1). Each host receives at most GBIT_PER_S from all others together; a packet that
// finds a full queue is lost, as in a switch. LOSS is the fraction of packets that are lost.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HOSTS = 8, MAX_BYTES = 9216, QUEUE = 1024 };

typedef struct {
    int64_t due_ns;
    int n_bytes;
    unsigned char bytes[MAX_BYTES];
} Packet;

// The packets to one host, in the order in which they are due.
typedef struct {
    int device;
    int64_t free_ns;  // when the last packet has been received
    unsigned first, end;
    Packet packets[QUEUE];
} Host;

static Host hosts[MAX_HOSTS];

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void check(int is_well, const char *what) {
    if (!is_well) {
        perror(what);
        exit(2);
    }
}

static int device_in(const char *name_space) {
    int file = open(name_space, O_RDONLY);
    check(file >= 0 && setns(file, CLONE_NEWNET) == 0, name_space);
    close(file);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq request = {.ifr_name = "link", .ifr_flags = IFF_TUN | IFF_NO_PI};
    check(device >= 0 && ioctl(device, TUNSETIFF, &request) == 0, "/dev/net/tun");
    return device;
}

static void deliver(Host *host, int64_t at_ns) {
    while (host->first != host->end && host->packets[host->first % QUEUE].due_ns <= at_ns) {
        Packet *packet = &host->packets[host->first++ % QUEUE];
        if (write(host->device, packet->bytes, packet->n_bytes) < 0) continue;  // it is down
    }
}

int main(int argc, char **argv) {
    check(argc > 5 && argc - 5 <= MAX_HOSTS, "link: DELAY_US GBIT_PER_S LOSS SEED NAMESPACE..");
    int n_hosts = argc - 5;
    double delay_ns = 1e3 * atof(argv[1]), ns_per_byte = 8 / atof(argv[2]), loss = atof(argv[3]);
    srand48(atol(argv[4]));
    struct pollfd files[MAX_HOSTS + 1];
    for (int i = 0; i < n_hosts; i++) {
        hosts[i].device = device_in(argv[5 + i]);
        files[i] = (struct pollfd){.fd = hosts[i].device, .events = POLLIN};
    }
    files[n_hosts] = (struct pollfd){.fd = 0, .events = POLLIN};
    // Ranks spin on all cores, so the switch must not wait for its turn.
    struct sched_param first = {.sched_priority = 1};
    check(sched_setscheduler(0, SCHED_FIFO, &first) == 0, "SCHED_FIFO");
    check(mlockall(MCL_CURRENT) == 0, "mlockall");
    puts("ready");
    fflush(stdout);
    while (!files[n_hosts].revents) {
        int64_t at_ns = now_ns(), due_ns = INT64_MAX;
        for (Host *host = hosts; host < hosts + n_hosts; host++) {
            deliver(host, at_ns);
            int64_t next_ns = host->packets[host->first % QUEUE].due_ns;
            if (host->first != host->end && next_ns < due_ns) due_ns = next_ns;
        }
        int64_t wait_ns = due_ns - now_ns();
        if (wait_ns < 0) wait_ns = 0;
        struct timespec wait = {wait_ns / 1000000000, wait_ns % 1000000000};
        ppoll(files, n_hosts + 1, due_ns == INT64_MAX ? NULL : &wait, NULL);
        for (int i = 0; i < n_hosts; i++) {
            unsigned char bytes[MAX_BYTES];
            int n_bytes = files[i].revents ? read(files[i].fd, bytes, MAX_BYTES) : 0;
            if (n_bytes < 20 || bytes[0] >> 4 != 4) continue;
            unsigned to = bytes[19] - 1u;  // the last byte of the destination
            if (to >= (unsigned)n_hosts || drand48() < loss) continue;
            Host *host = &hosts[to];
            if (host->end - host->first == QUEUE) continue;
            int64_t read_ns = now_ns();
            if (host->free_ns < read_ns) host->free_ns = read_ns;
            host->free_ns += ns_per_byte * n_bytes;
            Packet *packet = &host->packets[host->end++ % QUEUE];
            packet->due_ns = host->free_ns + delay_ns;
            packet->n_bytes = n_bytes;
            memcpy(packet->bytes, bytes, n_bytes);
        }
    }
    return 0;
}
