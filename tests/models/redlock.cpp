// Model of a lock on the majority of three independent servers, and of its token.
//
//     redlock lock <clients> <faults> <restarts> <ttl> <liveness> <mistake or ->
//     redlock token <lost> <retries> <mistake or ->
//
// lock: each client acquires once. Every server has the lock, its queue in the order of the clients' tickets (client 0
// came first), and the push of a hand-over. A push is valid until the deadline that the waiter's own request set. Every
// order of events is tried. At any moment:
//   - a request or a reply is late;
//   - nobody waits for a request or a reply any longer (a fault): such a request is executed at any later moment, or
//     never;
//   - a server restarts and has forgotten everything, and requests under way to it are lost;
//   - a waiter asks any server.
// With each request a waiter gives way on that server to a claim that came before it, unless one of its own requests
// there has no reply. A holder renews, and also asks the servers that it does not have. Their replies do not extend the
// validity. A holder asks all servers in a round, and a client that ends sends its release to all of them. Times are
// stored as the ticks that are left.
//
//   I1  at most one client believes
//   I2  a client that believes has a majority whose votes last at least as long (unless a server restarted)
//   I3  an id that was given up on every server neither holds nor waits on any server
//   P   once no further fault happens, every client is served, even without pushes
//
// token: two clients that do not exclude each other at all. Each reads the values that the servers give it, as early as
// it likes. Then it writes to all servers a value that is greater by one than the greatest of them. If a client finds a
// greater value there, it tries again with a greater one.
//
//   T1  two clients never have the same token
//   T2  a token is greater than each token that existed before its writing began
//
// The program prints what it found, and exits with 1 if that is a violation. Servers are alike, and states are compared
// by 64 bits.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string_view>
#include <type_traits>
#include <unordered_set>

constexpr int kServers = 3, kMajority = 2, kClients = 2;

struct Violation {
  const char* what;
};

const char* mistake = "-";
bool is(const char* word) { return std::string_view(mistake) == word; }

uint64_t hash_of(const void* data, size_t size) {
  uint64_t h = 0x9E3779B97F4A7C15;
  for (size_t i = 0; i < size; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const uint8_t*>(data) + i, std::min<size_t>(8, size - i));
    h = (h ^ word) * 0xff51afd7ed558ccd;
    h ^= h >> 29;
  }
  h *= 0xc4ceb9fe1a85ec53;
  return h ^ h >> 32;
}

template <class State>
struct Search {
  std::unordered_set<uint64_t> known;
  std::deque<State> open;
  template <class Check>
  void add(State s, Check check) {
    if (!known.insert(hash_of(&s, sizeof s)).second) return;
    check(s);
    open.push_back(s);
  }
};

// ---------------------------------------------------------------------------------------------------- the lock

namespace lock {

enum Kind : int8_t { kNone, kAsk, kAskOrGiveWay, kRenew, kEnd };
enum Phase : int8_t { kIdle, kWaits, kHolds, kEnds, kDone };

struct Stray {  // a request for whose reply nobody waits
  int8_t kind, age;
};
struct AtServer {  // the state of one client at one server
  int8_t live;      // in the queue: ticks for which it keeps its place
  int8_t vouched;   // ticks until the deadline that its own request set
  int8_t tombstone;
  int8_t push;      // the most ticks for which a push on its way can still count
  int8_t request;   // under way. Its reply comes with its execution; a later one counts for that much less
  Stray stray;
  int8_t vote;      // ticks for which this server admits no other client
  int8_t unsure;    // whether some request has no reply
  int8_t given_up;  // its vote does not count for this id
};
struct Server {
  int8_t owner, left;  // -1: free
  int8_t guard;        // ticks for which its vote does not count
  AtServer of[kClients];
};
struct Client {
  int8_t phase, belief;
  int8_t age;  // age of the request under way
};
struct State {
  Server server[kServers];
  Client client[kClients];
  int8_t faults, restarts, restarted;
};
static_assert(std::has_unique_object_representations_v<State>);

int clients, ttl, liveness;

int8_t capped(int ticks) { return static_cast<int8_t>(std::max(0, ticks)); }

// ---- the server

void leave(Server& s, int c) { s.of[c].live = s.of[c].vouched = 0; }

void join(Server& s, int c, int age) {
  s.of[c].live = static_cast<int8_t>(liveness);
  s.of[c].vouched = capped(std::min(liveness, ttl) - age);
}

// Give the lock to the first living waiter. Return `me` if that comes first, or -1 if there is none.
int pass(Server& s, int me) {
  for (int c = 0; c < clients; c++) {
    if (!s.of[c].live) continue;
    if (c == me) return me;
    s.owner = static_cast<int8_t>(c);
    s.left = s.of[c].live;
    s.of[c].push = std::max(s.of[c].push, s.of[c].vouched);
    leave(s, c);
    return c;
  }
  return -1;
}

bool execute(Server& s, int c, int kind, int age, bool tombstone) {
  AtServer& mine = s.of[c];
  auto take = [&] {
    leave(s, c);
    s.owner = static_cast<int8_t>(c);
    s.left = static_cast<int8_t>(ttl);
    return true;
  };
  if (kind == kEnd) {
    mine.tombstone |= tombstone && !is("notombstone");
    leave(s, c);
    if (s.owner == c) {
      s.owner = -1;
      s.left = 0;
      pass(s, -1);
    }
    return true;
  }
  if (kind == kRenew) {
    if (s.owner == c) s.left = static_cast<int8_t>(ttl);
    return s.owner == c;
  }
  if (s.owner == c) {
    if (kind == kAsk) return take();
    join(s, c, age);
    int first = pass(s, is("giveswaytoall") ? -1 : c);
    return first == c || first == -1 ? take() : false;
  }
  if (mine.tombstone) return false;
  join(s, c, age);
  if (s.owner < 0) {
    int first = pass(s, c);
    if (first == c || first == -1) return take();
  }
  return false;
}

// ---- the client

bool minority, receipt, renews_given_up;  // mistakes that the search tests often
int needed() { return minority ? 1 : kMajority; }

int8_t majority_of_votes(const State& s, int c) {  // the time until which a majority of servers admits no other client
  int8_t votes[kServers];
  bool given_up_too = s.client[c].phase == kHolds && renews_given_up;
  for (int i = 0; i < kServers; i++) {
    const AtServer& at = s.server[i].of[c];
    votes[i] = at.given_up && !given_up_too ? int8_t{0} : at.vote;
  }
  std::sort(votes, votes + kServers);
  int8_t least = votes[kServers - needed()];
  return receipt && least ? static_cast<int8_t>(ttl) : least;
}

bool under_way(const State& s, int c) {
  for (const Server& server : s.server)
    if (server.of[c].request) return true;
  return false;
}

void not_waited_for(State& s, AtServer& at, int c) {
  if (!at.stray.kind) at.stray = {at.request, s.client[c].age};
  at.request = kNone;
}

void end(State& s, int c) {
  for (Server& server : s.server) {
    AtServer& at = server.of[c];
    bool held = at.vote;
    if (at.request) {
      at.unsure = 1;
      not_waited_for(s, at, c);
    }
    if (held || !is("ackedonly")) at.request = kEnd;
    at.vote = 0;
  }
  s.client[c] = {kEnds, 0, 0};
}

// Forget what no later step reads, and sort the servers.
void normalize(State& s) {
  for (int c = 0; c < clients; c++) {
    Client& client = s.client[c];
    if (client.phase == kEnds && !under_way(s, c)) client.phase = kDone;
    if (!under_way(s, c)) client.age = 0;
    for (Server& server : s.server) {
      AtServer& at = server.of[c];
      if (at.given_up) at.push = 0;
      if (at.given_up && !(renews_given_up && client.phase == kHolds)) at.vote = 0;
      if (client.phase < kEnds) continue;
      at.push = at.vouched = at.vote = at.given_up = at.stray.age = 0;
      if (at.request) continue;
      if (at.tombstone || (at.stray.kind == kRenew && server.owner != c)) at.stray = {};  // it would find nothing to do
      if (!at.stray.kind) at.tombstone = at.unsure = 0;
    }
  }
  std::sort(s.server, s.server + kServers,
            [](const Server& a, const Server& b) { return std::memcmp(&a, &b, sizeof a) < 0; });
}

void answered(State& s, Server& server, int c, bool held) {
  AtServer& at = server.of[c];
  int kind = at.request;
  at.request = kNone;
  Client& client = s.client[c];
  int8_t worth = held && (!server.guard || is("noguard")) ? capped(ttl - client.age) : int8_t{0};
  if (client.phase == kWaits) {
    at.vote = worth;
  } else if (client.phase == kHolds && kind == kRenew) {
    at.vote = worth;
    client.belief = std::max(client.belief, majority_of_votes(s, c));
  } else if (client.phase == kHolds && is("topupcounts") && held) {
    client.belief = static_cast<int8_t>(ttl);
  }
}

struct Successors : Search<State> {
  size_t looked = 0;

  void check(const State& s) {
    int believers = 0;
    for (int c = 0; c < clients; c++) {
      const Client& client = s.client[c];
      believers += client.belief > 0;
      int servers = 0, left = 0;
      for (const Server& server : s.server) {
        servers += server.owner == c && server.left >= client.belief;
        left += server.owner == c || server.of[c].live;
      }
      if (client.belief && !s.restarted && servers < kMajority) throw Violation{"I2 believes without a majority"};
      if (client.phase == kDone && left) throw Violation{"I3 an ended id holds or waits"};
    }
    if (believers > 1) throw Violation{"I1 two believe"};
    if (hash_of(&s, sizeof s) % 512 == 0) looked++, progresses(s);
  }

  void progresses(State s) {
    for (Server& server : s.server)
      for (int c = 0; c < clients; c++) {
        AtServer& at = server.of[c];
        if (at.request) at.unsure = 1;
        at.request = kNone;
        at.stray = {};
        at.push = 0;
      }
    int bound = 2 * (ttl + liveness) + 3 * clients + ttl + 4, waiting = 0, left = 0;
    for (int c = 0; c < clients; c++) waiting += s.client[c].phase == kWaits;
    for (left = waiting; left && bound--;) {
      for (int c = 0; c < clients; c++) {
        Client& client = s.client[c];
        if (client.phase == kWaits) {
          bool void_now = false;
          for (Server& server : s.server) void_now |= server.of[c].given_up;
          if (void_now) {  // another id, with the same ticket
            for (Server& server : s.server) {
              execute(server, c, kEnd, 0, false);
              server.of[c].unsure = server.of[c].given_up = server.of[c].vote = 0;
            }
          }
          bool gives_way = !majority_of_votes(s, c);
          for (Server& server : s.server) {
            AtServer& at = server.of[c];
            int kind = gives_way && !at.unsure && !is("keeps") ? kAskOrGiveWay : kAsk;
            bool held = execute(server, c, kind, 0, false);
            at.vote = held && !server.guard ? static_cast<int8_t>(ttl) : int8_t{0};
          }
          if (majority_of_votes(s, c)) client.phase = kHolds, left--;
        } else if (client.phase == kHolds || client.phase == kEnds) {
          for (Server& server : s.server) execute(server, c, kEnd, 0, false);
          client.phase = kDone;
        }
      }
      tick(s);
      for (Server& server : s.server)
        for (int c = 0; c < clients; c++) server.of[c].push = 0;
    }
    if (left) throw Violation{"P not served"};
  }

  void next(State s) {
    normalize(s);
    add(s, [this](const State& n) { check(n); });
  }

  static void tick(State& s) {
    auto down = [](int8_t& ticks) { ticks = capped(ticks - 1); };
    for (Server& server : s.server) {
      down(server.left);
      down(server.guard);
      if (!server.left) server.owner = -1;
      for (int c = 0; c < clients; c++) {
        AtServer& at = server.of[c];
        down(at.live);
        down(at.vouched);
        if (!at.live) at.vouched = 0;
        down(at.push);
        down(at.vote);
        if (at.stray.kind && at.stray.age < ttl) at.stray.age++;
      }
    }
    for (int c = 0; c < clients; c++) {
      Client& client = s.client[c];
      down(client.belief);
      if (client.age < ttl) client.age++;
      if (client.phase == kHolds && !client.belief) end(s, c);
    }
  }

  void from(const State& s) {
    {
      State n = s;
      tick(n);
      next(n);
    }
    for (int i = 0; i < kServers; i++) {
      for (int c = 0; c < clients; c++) from(s, i, c);
      if (s.restarts) {
        State n = s;
        n.restarts--;
        n.restarted = 1;
        Server& server = n.server[i];
        server.owner = -1;
        server.left = 0;
        server.guard = static_cast<int8_t>(ttl);
        for (int c = 0; c < clients; c++) {
          AtServer& at = server.of[c];
          leave(server, c);
          at.tombstone = 0;
          at.stray = {};
          at.unsure |= at.request && at.request != kEnd;
          at.given_up |= at.request == kAskOrGiveWay;
          at.request = kNone;
        }
        next(n);
      }
    }
    for (int c = 0; c < clients; c++) {
      int phase = s.client[c].phase;
      State n = s;
      if (phase == kIdle) {
        n.client[c].phase = kWaits;
        next(n);
      }
      if (phase == kWaits && majority_of_votes(s, c)) {
        n.client[c].phase = kHolds;
        n.client[c].belief = majority_of_votes(s, c);
        next(n);
      }
      if (phase == kWaits || phase == kHolds) {
        n = s;
        end(n, c);
        next(n);
      }
      if ((phase == kWaits || phase == kHolds) && !under_way(s, c)) {
        n = s;
        n.client[c].age = 0;
        bool gives_way = phase == kWaits && !majority_of_votes(s, c);
        for (Server& server : n.server) {
          AtServer& at = server.of[c];
          at.request = phase == kHolds && (at.vote || at.given_up) ? kRenew : kAsk;
          if (!gives_way || (at.unsure && !is("giveswayunsure"))) continue;
          at.request = kAskOrGiveWay;
          at.vote = 0;
          if (!is("nofloor")) at.push = at.vouched = 0;
        }
        next(n);
      }
    }
  }

  void from(const State& s, int i, int c) {
    const AtServer& at = s.server[i].of[c];
    int phase = s.client[c].phase;
    if (!at.request) {
      if (phase == kWaits && at.push && (!s.server[i].guard || is("noguard"))) {
        State n = s;
        AtServer& mine = n.server[i].of[c];
        mine.vote = std::max(mine.vote, is("pushreceipt") ? static_cast<int8_t>(liveness) : mine.push);
        mine.push = 0;
        next(n);
      }
    } else {
      State n = s;
      answered(n, n.server[i], c, execute(n.server[i], c, at.request, s.client[c].age, at.unsure));
      next(n);
    }
    if (at.request && s.faults) {  // the reply is lost, or the request is executed later
      for (bool executed : {false, true}) {
        State n = s;
        n.faults--;
        AtServer& mine = n.server[i].of[c];
        if (executed) execute(n.server[i], c, at.request, s.client[c].age, at.unsure);
        if (at.request == kEnd) {  // the request is sent again
          if (!executed && !at.stray.kind) mine.stray = {kEnd, 0};
        } else {
          if (executed) mine.request = kNone;
          else not_waited_for(n, mine, c);
          mine.unsure = 1;
          if (at.request == kAskOrGiveWay && !is("countson")) mine.given_up = 1;
        }
        next(n);
      }
    }
    if (at.stray.kind) {
      State n = s;
      n.server[i].of[c].stray = {};
      execute(n.server[i], c, at.stray.kind, at.stray.age, at.unsure);
      next(n);
    }
  }
};

int run(char** words) {
  clients = std::atoi(words[0]);
  ttl = std::atoi(words[3]);
  liveness = std::atoi(words[4]);
  mistake = words[5];
  minority = is("minority");
  receipt = is("receipt");
  renews_given_up = is("renewsgivenup");
  State first = {};
  first.faults = static_cast<int8_t>(std::atoi(words[1]));
  first.restarts = static_cast<int8_t>(std::atoi(words[2]));
  for (Server& server : first.server) server.owner = -1;
  Successors search;
  try {
    search.next(first);
    while (!search.open.empty()) {
      State s = search.open.front();
      search.open.pop_front();
      search.from(s);
    }
  } catch (const Violation& found) {
    std::printf("lock %s %s: %s, after %zu states\n", words[0], mistake, found.what, search.known.size());
    return 1;
  }
  std::printf("lock %s %s %s %s %s: holds, %zu states, progress of %zu\n", words[0], words[1], words[2], words[3],
              words[4], search.known.size(), search.looked);
  return 0;
}

}  // namespace lock

// --------------------------------------------------------------------------------------------------- the token

namespace token {

constexpr int kTwo = 2;

struct Client {
  int8_t phase;      // 0 reads, 1 writes, 2 has a token, 3 gave up
  int8_t retries;
  int8_t read[kServers];
  int8_t greatest;   // the greatest value that it read
  int8_t token;      // the token that it writes or has
  int8_t sent, stored;  // bits by server
  int8_t found;      // the greatest value that made it try again
  int8_t above;      // the greatest token of other clients when its writing began
};
struct State {
  int8_t count[kServers];
  Client client[kTwo];
  int8_t stray[kTwo][kServers];  // a write that is executed later, or never
  int8_t lost;
};
static_assert(std::has_unique_object_representations_v<State>);

struct Successors : Search<State> {
  void next(State s) {
    add(s, [](const State& n) {
      const Client &a = n.client[0], &b = n.client[1];
      if (a.phase == 2 && b.phase == 2 && a.token == b.token) throw Violation{"T1 the same token twice"};
      for (const Client& c : n.client)
        if (c.phase == 2 && c.token <= c.above) throw Violation{"T2 a token is not greater than one before it"};
    });
  }

  static bool write(State& s, int i, int token) {
    if (s.count[i] >= token && !is("blind")) return false;
    s.count[i] = static_cast<int8_t>(token);
    return true;
  }

  void from(const State& s) {
    for (int c = 0; c < kTwo; c++) {
      const Client& me = s.client[c];
      const Client& other = s.client[1 - c];
      for (int i = 0; i < kServers; i++) {
        if (s.stray[c][i]) {
          State n = s;
          write(n, i, s.stray[c][i]);
          n.stray[c][i] = 0;
          next(n);
        }
        if (me.phase == 0 && !me.read[i]) {
          State n = s;
          Client& mine = n.client[c];
          mine.read[i] = 1;
          n.count[i]++;
          if (s.lost) {
            State lost = n;
            lost.lost--;
            next(lost);
          }
          mine.read[i] = 2;
          mine.greatest = std::max(mine.greatest, n.count[i]);
          next(n);
        }
        if (me.phase == 1 && !(me.sent >> i & 1)) {
          State n = s;
          Client& mine = n.client[c];
          mine.sent |= 1 << i;
          if (s.lost && !s.stray[c][i]) {  // the reply is lost, and the request may be executed later
            State lost = n;
            lost.lost--;
            lost.stray[c][i] = me.token;
            next(lost);
          }
          if (write(n, i, me.token)) {
            mine.stored |= 1 << i;
          } else {
            mine.found = std::max(mine.found, n.count[i]);
          }
          next(n);
        }
      }
      int reads = 0;
      for (int8_t read : me.read) reads += read == 2;
      if (me.phase == 0 && reads >= (is("oneread") ? 1 : kMajority)) {
        State n = s;
        Client& mine = n.client[c];
        mine.phase = is("nowrite") ? 2 : 1;
        mine.token = static_cast<int8_t>(me.greatest + 1);
        mine.above = other.phase == 2 ? other.token : int8_t{0};
        next(n);
      }
      if (me.phase == 1 && __builtin_popcount(me.stored) >= (is("onewrite") ? 1 : kMajority)) {
        State n = s;
        n.client[c].phase = 2;
        next(n);
      }
      if (me.phase == 1 && me.found >= me.token) {
        State n = s;
        Client& mine = n.client[c];
        if (me.retries) {
          mine.retries--;
          mine.token = static_cast<int8_t>(me.found + 1);
          mine.sent = mine.found = 0;
          if (!is("addsup")) mine.stored = 0;
        } else {
          mine.phase = 3;
        }
        next(n);
      }
    }
  }
};

int run(char** words) {
  mistake = words[2];
  State first = {};
  first.lost = static_cast<int8_t>(std::atoi(words[0]));
  for (Client& client : first.client) client.retries = static_cast<int8_t>(std::atoi(words[1]));
  Successors search;
  try {
    search.next(first);
    while (!search.open.empty()) {
      State s = search.open.front();
      search.open.pop_front();
      search.from(s);
    }
  } catch (const Violation& found) {
    std::printf("token %s: %s, after %zu states\n", mistake, found.what, search.known.size());
    return 1;
  }
  std::printf("token %s %s: holds, %zu states\n", words[0], words[1], search.known.size());
  return 0;
}

}  // namespace token

int main(int argc, char** argv) {
  if (argc == 8 && std::string_view(argv[1]) == "lock") return lock::run(argv + 2);
  if (argc == 5 && std::string_view(argv[1]) == "token") return token::run(argv + 2);
  return 2;
}
