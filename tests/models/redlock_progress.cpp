// Model of progress with Redlock: for how long a name is free while a claim waits for it. This model has a clock.
//
//     redlock_progress <claims> <stopped servers> <lost messages> <most ticks> <mistake or ->
//
// There are three servers. The former holder's release reaches each server within a tick. A stopped server sends no
// replies. Each claim has the same place in the queue of every server. At the start each claim is in the queue of each
// server, or its request is still on the way there. So every split of the votes is tried. A message is delivered at
// once or a tick later, in any order. Any message of a claim may be the lost one: a request, a reply or a push.
//
// A claim with a minority of the votes waits for two ticks, and each further time for twice as long. Then it gives way:
// each server that votes for it hands the name to the first claim of its queue. A claim asks each server again every
// `kHeartbeat` ticks. If a reply is missing for `kLatest` ticks, a claim with votes, or with a request to give way, is
// *spent*. It is then released at all servers, and continues as a new claim with the same place. If a server handed the
// name to a claim that does not renew it there, the claim loses it after `kLease` ticks.
//
//   B  a claim has a majority after at most so many ticks
//
// The program prints the longest time, and exits with 1 if it is longer than the bound. A path ends when a claim has a
// majority. Servers are alike, and states are compared by 64 bits.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string_view>
#include <type_traits>
#include <unordered_set>

constexpr int kServers = 3, kMajority = 2, kMost = 3;
constexpr int kPatience = 2, kLongestPatience = 8, kLatest = 8, kHeartbeat = 12, kLease = 24;

enum Seen : int8_t { kOut, kWaits, kVotes, kYields };
enum Kind : int8_t { kNone, kAsk, kGiveWay, kEnd };
enum Said : int8_t { kNothing, kVote, kTaken, kEnded };

struct At {          // one claim at one server
  int8_t queued;     // whether it is in the queue
  int8_t seen;       // how the claim understands the server's newest statement
  int8_t request;    // the request on its way to the server
  int8_t said;       // the reply on its way back
  int8_t age;        // ticks for which this message has been on its way, at most one
  int8_t push;       // 0, or for a push on its way, its age plus one
  int8_t waits_for;  // 0, or for how many ticks the claim has waited for the reply, plus one
};
struct Server {
  int8_t holder;    // -1: free; kFormer: the former holder
  int8_t left;      // ticks left of the holder's lease
  int8_t released;  // the former holder's release: 0 arrived, 1, 2 on its way and its age plus one, 3 lost
  int8_t stopped;
  At of[kMost];
};
struct Claim {
  int8_t timer;      // 0, or ticks until it gives way, plus one
  int8_t patience;   // ticks of the last wait before it gave way
  int8_t heartbeat;  // ticks until it sends its next heartbeat
  int8_t ending;     // whether it is spent, and its releases are on their way
};
struct State {
  Server server[kServers];
  Claim claim[kMost];
  int8_t lose, free;
};
static_assert(std::has_unique_object_representations_v<State>);
constexpr int kFormer = kMost;

int claims, bound, longest;
const char* mistake = "-";
bool is(const char* word) { return std::string_view(mistake) == word; }

std::unordered_set<uint64_t> known;
std::deque<State> open;

uint64_t hash_of(const State& s) {
  uint64_t h = 0x9E3779B97F4A7C15;
  const auto* p = reinterpret_cast<const uint8_t*>(&s);
  for (size_t i = 0; i < sizeof s; i++) {
    h = (h ^ p[i]) * 0x100000001b3;
    if (i % 8 == 7) h ^= h >> 29;
  }
  h *= 0xff51afd7ed558ccd;
  h ^= h >> 32;
  h *= 0xc4ceb9fe1a85ec53;
  return h ^ h >> 29;
}

int votes(const State& s, int c) {
  return static_cast<int>(std::count_if(std::begin(s.server), std::end(s.server), [&](const Server& v) { return v.of[c].seen == kVotes; }));
}
bool held(const State& s) {
  for (int c = 0; c < claims; c++)
    if (!s.claim[c].ending && votes(s, c) >= kMajority) return true;
  return false;
}

void add(State s) {
  if (held(s)) return;
  // Servers are alike.
  std::sort(std::begin(s.server), std::end(s.server), [](const Server& a, const Server& b) { return std::memcmp(&a, &b, sizeof a) < 0; });
  if (known.insert(hash_of(s)).second) open.push_back(s);
}

// ---- the server

void hand_over(Server& v) {  // to the first of the queue
  v.holder = -1;
  for (int c = 0; c < claims; c++)
    if (v.of[c].queued) {
      v.holder = static_cast<int8_t>(c), v.left = kLease, v.of[c].queued = 0, v.of[c].push = 1;
      return;
    }
}
void execute(Server& v, int c) {
  At& a = v.of[c];
  const int kind = a.request;
  a.request = kNone, a.age = 0, a.said = kTaken;
  if (kind == kEnd) {
    a.queued = 0, a.push = 0, a.said = kEnded;
    if (v.holder == c) hand_over(v);
    return;
  }
  if (v.holder == c && kind == kGiveWay) {
    a.queued = 1;
    hand_over(v);
    if (v.holder == c) a.push = 0;  // this claim is the first one, so the reply confirms its vote
  } else if (v.holder == -1) {
    a.queued = 1;
    hand_over(v);
    if (v.holder == c) a.push = 0;
  } else if (v.holder != c) {
    a.queued = 1;
  }
  if (v.holder == c) v.left = kLease, a.said = kVote;
}

// ---- the claim

void send(State& s, int i, int c, int kind) {
  At& a = s.server[i].of[c];
  if (a.waits_for) return;
  a.request = static_cast<int8_t>(kind), a.age = 0, a.waits_for = 1;
  if (kind == kGiveWay) a.seen = kYields, a.push = 0;
}
void evaluate(State& s, int c, bool pushed = false) {
  Claim& k = s.claim[c];
  if (k.ending) return;
  const int have = votes(s, c);
  if (!have) {
    k.timer = 0, k.patience = 0;
  } else if (!k.timer && !(is("push-starts-no-timer") && pushed)) {
    k.patience = static_cast<int8_t>(std::min(kLongestPatience, std::max(kPatience, 2 * k.patience)));
    k.timer = static_cast<int8_t>(k.patience + 1);
  }
}
void act(State& s, int c) {
  s.claim[c].timer = 0;
  for (int i = 0; i < kServers; i++) {
    if (s.server[i].of[c].seen == kVotes && !is("keeps-its-minority")) send(s, i, c, kGiveWay);
    if (s.server[i].of[c].seen == kOut) send(s, i, c, kAsk);
  }
  for (const Server& v : s.server)
    if (v.of[c].waits_for) return;
  if (votes(s, c)) evaluate(s, c);  // no request was sent there
}
void ends(State& s, int c) {  // spent: tell every server. The tombstone covers what is still on its way.
  s.claim[c] = {0, 0, kHeartbeat, 1};
  for (int i = 0; i < kServers; i++) {
    At& a = s.server[i].of[c];
    a.seen = kOut, a.request = kEnd, a.said = kNothing, a.age = 0, a.push = 0, a.waits_for = 1;
  }
}
void again(State& s, int c) {  // continue as a new claim, as soon as a majority has replied to the release
  int told = 0;
  for (int i = 0; i < kServers; i++) told += !s.server[i].of[c].waits_for;
  if (told < kMajority) return;
  s.claim[c].ending = 0;
  for (int i = 0; i < kServers; i++) send(s, i, c, kAsk);
}

// ---- time

bool must_arrive(const State& s) {
  for (const Server& v : s.server) {
    if (v.stopped) continue;
    if (v.released == 2) return true;
    for (int c = 0; c < claims; c++) {
      const At& a = v.of[c];
      if (((a.request || a.said) && a.age) || a.push == 2) return true;
    }
  }
  return false;
}
void tick(State s) {
  s.free++;
  longest = std::max<int>(longest, s.free);
  if (s.free > bound) {
    std::printf("%s: VIOLATION, a name is free for more than %d ticks, after %zu states\n", mistake, bound, known.size());
    for (int i = 0; i < kServers; i++) {
      const Server& v = s.server[i];
      std::printf("  server %d%s: holder %d, left %d, released %d:", i, v.stopped ? " stopped" : "", v.holder, v.left, v.released);
      for (int c = 0; c < claims; c++) {
        const At& a = v.of[c];
        std::printf(" [%s queued %d, request %d, said %d, push %d, waits %d]", a.seen == kVotes ? "VOTES" : a.seen == kYields ? "YIELDS" : a.seen == kWaits ? "WAITS" : "OUT", a.queued, a.request, a.said, a.push, a.waits_for);
      }
      std::puts("");
    }
    std::exit(1);
  }
  for (int i = 0; i < kServers; i++) {
    Server& v = s.server[i];
    if (!v.stopped && v.released && v.released < 3) v.released++;
    if (!v.stopped && v.holder >= 0 && v.left && !--v.left) hand_over(v);
    for (int c = 0; c < claims; c++) {
      At& a = v.of[c];
      if (a.request || a.said) a.age = 1;
      if (a.push == 1) a.push = 2;
      if (a.waits_for && a.waits_for <= kLatest) a.waits_for++;
    }
  }
  for (int c = 0; c < claims; c++) {
    Claim& k = s.claim[c];
    bool spent = false;
    for (Server& v : s.server) {
      At& a = v.of[c];
      if (a.waits_for <= kLatest) continue;
      if (k.ending) {
        if (!v.stopped) a.request = kEnd, a.age = 0, a.waits_for = 1;  // the clerk sends the release again
        continue;
      }
      // No reply: the server may execute it at any time.
      if (a.seen == kVotes || a.seen == kYields) spent = !is("lost-give-way-waits");
      if (a.seen == kOut || a.seen == kWaits) a.waits_for = 0, a.request = kNone;
    }
    if (spent) {
      ends(s, c);
      continue;
    }
    if (k.ending) {
      again(s, c);
      continue;
    }
    if (k.timer && !--k.timer) k.timer = 1;
    if (k.timer == 1) act(s, c);
    if (k.heartbeat && !is("no-heartbeat") && !--k.heartbeat) {
      k.heartbeat = kHeartbeat;
      for (int i = 0; i < kServers; i++)
        if (s.server[i].of[c].seen != kYields) send(s, i, c, kAsk);
    }
  }
  add(s);
}

void look(const State& s) {
  if (!must_arrive(s)) tick(s);
  for (int i = 0; i < kServers; i++) {
    if (s.server[i].stopped) continue;
    if (s.server[i].released == 1 || s.server[i].released == 2) {
      State t = s;
      t.server[i].released = 0;
      hand_over(t.server[i]);
      add(t);
    }
    for (int c = 0; c < claims; c++) {
      const At& a = s.server[i].of[c];
      if (a.request) {
        State t = s;
        if (s.lose) {
          t.lose--, t.server[i].of[c].request = kNone;
          add(t), t = s;
        }
        execute(t.server[i], c);
        add(t);
      } else if (a.said) {
        State t = s;
        At& b = t.server[i].of[c];
        b.said = kNothing;
        if (s.lose) {
          t.lose--;
          add(t), t.lose++;
        }
        b.waits_for = 0;
        if (a.said == kEnded) {
          if (t.claim[c].ending) again(t, c);
        } else {
          b.seen = a.said == kVote ? kVotes : kWaits;
          evaluate(t, c);
        }
        add(t);
      }
      if (a.push && !a.said) {  // a push comes after the reply to the request that joined
        State t = s;
        At& b = t.server[i].of[c];
        b.push = 0;
        if (s.lose) {
          t.lose--;
          add(t), t.lose++;
        }
        if (a.seen != kYields && !t.claim[c].ending) b.seen = kVotes, evaluate(t, c, true);
        add(t);
      }
    }
  }
}

int main(int count, char** given) {
  if (count < 6) return 2;
  claims = std::atoi(given[1]), bound = std::atoi(given[4]), mistake = given[5];
  const int stopped = std::atoi(given[2]);
  State s;
  std::memset(&s, 0, sizeof s);
  s.lose = static_cast<int8_t>(std::atoi(given[3]));
  for (int i = 0; i < kServers; i++) s.server[i].holder = kFormer, s.server[i].released = 1, s.server[i].stopped = i < stopped;
  for (int c = 0; c < claims; c++) s.claim[c].heartbeat = kHeartbeat;
  // At the start each claim is in the queue of each server, or its request has not arrived there.
  for (int joined = 0; joined < 1 << kServers * claims; joined++) {
    State t = s;
    for (int i = 0; i < kServers; i++)
      for (int c = 0; c < claims; c++) {
        At& a = t.server[i].of[c];
        if (joined >> (i * claims + c) & 1) a.queued = 1, a.seen = kWaits; else a.request = kAsk, a.waits_for = 1;
      }
    add(t);
  }
  while (!open.empty()) {
    const State t = open.back();
    open.pop_back();
    look(t);
  }
  std::printf("%d claims, %d stopped, %d lost: %zu states exhausted, a name is free for at most %d ticks\n", claims, stopped, std::atoi(given[3]), known.size(), longest);
}
