// Model of the lock on one Redis: the scripts acquire, renew, release, rest and what they share (pass), and the clients'
// rules.
//
// Every order of events is tried, with these at will: requests and answers are late, lost, or executed twice; a client
// stops for ever (its subscription ends with it, or stays half open); a subscription breaks and comes back; an operator
// deletes the key; the server's clock is stepped back. Time is what is left of each deadline, in ticks, so no run is
// bounded in time. A push is a hint after which a client asks; as it may ask at any moment, pushes need no state.
//
//   redis_queue <clients> <faults> <crashes> <deletes> <steps back> <ttl> <liveness> <looked at> <mistake or ->
//
// <clients>: one letter each: W waits in the queue, T tries once without joining it, 2 waits and comes a second time,
// X waits, and lets the name rest (hold_at_least) where the others release it.
// Prints what it found, and exits with 1 if that is a violation.
//
//   I1  no two clients believe that they hold it, but for one whose key an operator deleted
//   I2  who believes is the owner at the server, for at least as long
//   I3  an id whose end was answered neither holds nor waits
//   I4  no waiter that is alive and listens is overtaken
//   I5  what is handed over ends with a waiter's liveness, though the clock was stepped back
//   I6  nothing is handed over to who certainly does not listen
//   I7  no release leaves the lock free while a waiter that it could have seen is alive and listens
//   I8  all who wait are served within ttl + liveness + clients + 1 ticks (and a rest for each X), though every push is
//       lost
//   I9  a rest ends when its first execution said, or earlier: nobody revives or lengthens it
//   I10 what rests is nobody else's before the end that its holder asked for, but for an operator
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_set>

constexpr int kClients = 3, kQueue = 6, kStrays = 6, kStepBack = 3, kRestFor = 3;

enum Phase : int8_t { kIdle, kWaiting, kHolding, kLeaving, kDone };
enum Kind : int8_t { kNone, kAcquire, kRenew, kRelease, kRest };

// What a mistake leaves out or does instead; each must be found.
enum Mistake {
  kCorrect,
  kNobodyAtTheLimit,     // who cannot be looked at is taken for nobody
  kNoCap,                // a deadline from before the step back is believed
  kPublishCounts,        // who listens to everything makes the dead look alive
  kFreeIsNotPassedOn,    // only the owner's release hands over
  kReceipt,              // validity counts from the answer
  kPlainDelete,          // a release does not look whose lock it is
  kQueueOnly,            // a cancel leaves the queue, not the lock
  kNoTombstone,          // a request that comes after its cancel takes the lock
  kNewcomersFirst,       // a free lock is taken whoever waits
  kDeadStay,             // who does not ask any more keeps its place
  kWholeTtl,             // a hand-over lasts for a ttl
  kRestKeepsId,          // a name that rests still is its id's
  kRestLengthens,        // a rest that is sent again, or comes late, sets a new end
  kRestPasses,           // a rest hands over at once, as a release does
};
constexpr const char* kMistakes[] = {"-",           "nobody",    "nocap",       "publish",   "freestays", "receipt",
                                     "plaindelete", "queueonly", "notombstone", "newcomers", "deadstay",  "wholettl",
                                     "restkeepsid", "restlengthens", "restpasses"};

struct Client {
  int8_t attempt, phase, belief, alive;
  int8_t unsure;   // some request of this id has no answer
  int8_t deleted;  // an operator deleted its key: what it believes until it is told is nobody's fault
  int8_t kind, executed, age, answer;  // the request in flight; its age counts from its sending
  int8_t seconds;     // … and, if it asks for a rest, for how long
  int8_t rest, kept;  // what is left of the time for which X wants the name kept; it was told that it is
};
struct Entry {
  int8_t id, left;
};
struct Stray {  // a request that nobody waits for any more; it is executed at any moment, or never
  int8_t kind, id, tombstone, seconds;
};
struct State {
  int8_t owner, left, tombstones, finished, deaf, faults, crashes, deletes, steps, queued, strays, stepped;
  int8_t resting, rests_at_most;  // the owner is the marker of an id; what was left when it was first set, counted down
  Entry queue[kQueue];
  Stray stray[kStrays];
  Client client[kClients];
};
static_assert(std::has_unique_object_representations_v<State>);

struct Violation {
  const char* what;
};
struct Hash {
  size_t operator()(const State& state) const {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(&state), sizeof state});
  }
};
struct Same {
  bool operator()(const State& a, const State& b) const { return !std::memcmp(&a, &b, sizeof a); }
};

int clients, ttl, liveness, looked_at;
std::string kinds;
Mistake mistake;

int client_of(int id) { return id / 2; }
bool joins(int client) { return kinds[client] != 'T'; }
bool listens(const State& s, int id) { return !(s.deaf >> client_of(id) & 1); }

// ---- the server: each function is a script, or a part of one, and atomic

int place(const State& s, int id) {
  for (int i = 0; i < s.queued; i++)
    if (s.queue[i].id == id) return i;
  return -1;
}

void leave_at(State& s, int i) {
  std::copy(s.queue + i + 1, s.queue + s.queued, s.queue + i);
  s.queue[--s.queued] = {};
}

void leave(State& s, int id) {
  if (int i = place(s, id); i >= 0) leave_at(s, i);
}

void grant(State& s, int id, int left) {
  for (int i = 0; i < s.queued && s.queue[i].id != id; i++)
    if (s.queue[i].left > 0 && listens(s, s.queue[i].id)) throw Violation{"I4: a waiter was overtaken"};
  s.owner = id;
  s.left = left;
  if (Client& c = s.client[client_of(id)]; left >= c.belief && !c.answer) c.deleted = 0;
  leave(s, id);
}

bool pass(State& s, int me) {
  int skipped = 0;
  while (skipped < looked_at) {
    if (skipped == s.queued || s.queue[skipped].id == me) return true;
    Entry& head = s.queue[skipped];
    if (mistake != kNoCap) head.left = std::min<int>(head.left, liveness);
    if (head.left <= 0 && mistake != kDeadStay) {
      leave_at(s, skipped);
    } else if (!listens(s, head.id) && mistake != kPublishCounts) {
      skipped++;
    } else {
      if (!listens(s, head.id)) throw Violation{"I6: it was handed over to the dead"};
      int left = mistake == kWholeTtl ? ttl : mistake == kDeadStay ? std::max<int>(head.left, 1) : head.left;
      if (left > liveness) throw Violation{"I5: a hand-over outlasts a liveness"};
      grant(s, head.id, left);
      return false;
    }
  }
  return mistake == kNobodyAtTheLimit;
}

bool holds(const State& s, int id) { return s.owner == id && (!s.resting || mistake == kRestKeepsId); }

int acquire(State& s, int id, bool join) {
  if (holds(s, id)) {
    s.left = ttl;
    return 1;
  }
  if (s.tombstones >> id & 1) return -1;
  if (join) {
    int i = place(s, id);
    if (i < 0) {
      if (s.queued == kQueue) throw Violation{"the queue of the model is too short"};
      i = s.queued++;
      s.queue[i].id = id;
    }
    s.queue[i].left = liveness;
  }
  if (s.owner >= 0 || !(mistake == kNewcomersFirst || pass(s, id))) return 0;
  grant(s, id, ttl);
  return 1;
}

int renew(State& s, int id) {
  if (!holds(s, id)) return 0;
  s.left = ttl;
  return 1;
}

void vacate(State& s) {
  s.owner = -1;
  s.left = s.resting = s.rests_at_most = 0;
}

int release(State& s, int id, bool tombstone) {
  bool held = s.owner == id && !s.resting;
  if (tombstone && mistake != kNoTombstone) s.tombstones |= 1 << id;
  leave(s, id);
  if (held && mistake == kQueueOnly && s.client[client_of(id)].belief == 0) return 1;
  if (held || mistake == kPlainDelete) {
    vacate(s);
  }
  if (s.owner < 0 && (held || mistake != kFreeIsNotPassedOn)) pass(s, -1);
  if (s.owner < 0)
    for (int i = 0, deaf = 0; i < s.queued && deaf < looked_at; i++) {
      if (!listens(s, s.queue[i].id))
        deaf++;
      else if (s.queue[i].left > 0)
        throw Violation{"I7: a release left it free"};
    }
  return held;
}

int rest(State& s, int id, bool tombstone, int seconds) {
  if (s.owner != id || mistake == kRestPasses) return release(s, id, tombstone);
  if (tombstone) s.tombstones |= 1 << id;
  if (!s.resting) {
    s.resting = 1;
    s.left = s.rests_at_most = seconds;
  } else if (seconds < s.left || mistake == kRestLengthens) {
    s.left = seconds;
  }
  return 1;
}

int execute(State& s, int kind, int id, bool tombstone, int seconds) {
  if (kind == kAcquire) return acquire(s, id, joins(client_of(id)));
  if (kind == kRenew) return renew(s, id);
  if (kind == kRest) return rest(s, id, tombstone, seconds);
  return release(s, id, tombstone);
}

// ---- the clients

int id_of(const State& s, int i) { return 2 * i + s.client[i].attempt; }

void forget_request(Client& c) { c.kind = c.executed = c.age = c.answer = c.seconds = 0; }

void send(Client& c, Kind kind) {
  forget_request(c);
  c.kind = kind == kRelease && c.rest ? kRest : kind;
  c.seconds = c.kind == kRest ? c.rest : 0;
}

void strand(State& s, int i) {  // nobody reads the answer any more; what was not executed still may be
  Client& c = s.client[i];
  if (c.kind && !c.executed) {
    if (s.strays == kStrays) throw Violation{"the model has too few strays"};
    s.stray[s.strays++] = {c.kind, static_cast<int8_t>(id_of(s, i)), c.unsure, c.seconds};
  }
  forget_request(c);
}

void end_attempt(State& s, int i) {
  Client& c = s.client[i];
  s.finished |= 1 << id_of(s, i);
  c.belief = c.unsure = c.deleted = 0;
  if (!c.kept) c.rest = 0;
  bool again = kinds[i] == '2' && c.attempt == 0;
  c.attempt += again;
  c.phase = again ? kIdle : kDone;
}

void leave_it(Client& c) {
  c.phase = kLeaving;
  c.belief = 0;
}

void lose(Client& c) {  // what was lost does not rest
  leave_it(c);
  c.rest = 0;
}

void understand(State& s, int i) {
  Client& c = s.client[i];
  int kind = c.kind, answer = c.answer, valid = ttl - (mistake == kReceipt ? 0 : c.age);
  forget_request(c);
  if (kind == kRelease || kind == kRest) {
    c.kept = kind == kRest && answer == 1 && !c.deleted;
    end_attempt(s, i);
  } else if (kind == kAcquire && answer < 0) {
    throw Violation{"an id that nobody cancelled has a tombstone"};
  } else if (kind == kAcquire && answer == 1) {
    c.phase = valid > 0 ? kHolding : kLeaving;
    c.belief = std::max(valid, 0);
    if (kinds[i] == 'X' && c.belief && !c.rest) c.rest = kRestFor;
  } else if (kind == kAcquire && !joins(i)) {
    if (c.unsure)
      c.phase = kLeaving;
    else
      end_attempt(s, i);
  } else if (kind == kRenew && answer == 1) {
    c.belief = std::max<int>(c.belief, valid);
  } else if (kind == kRenew) {
    lose(c);
  }
}

// ---- invariants

void check(const State& s) {
  int believers = 0;
  for (int i = 0; i < clients; i++) {
    const Client& c = s.client[i];
    if (c.belief <= 0 || c.deleted) continue;
    believers++;
    if (mistake == kCorrect && (s.owner != id_of(s, i) || s.resting || s.left < c.belief))
      throw Violation{"I2: a belief that the server does not share"};
  }
  if (believers > 1) throw Violation{"I1: two believers"};
  if (s.resting && s.left > s.rests_at_most) throw Violation{"I9: a rest became longer"};
  for (int i = 0; i < clients; i++)
    if (s.client[i].kept && s.client[i].rest && s.owner != id_of(s, i)) throw Violation{"I10: a rest was cut short"};
  if (s.owner >= 0 && !s.resting && s.finished >> s.owner & 1) throw Violation{"I3: an id that ended holds"};
  for (int i = 0; i < s.queued; i++)
    if (s.finished >> s.queue[i].id & 1) throw Violation{"I3: an id that ended waits"};
}

void tick(State& s) {
  s.rests_at_most -= s.rests_at_most > 0;
  if (s.left > 0 && --s.left == 0) vacate(s);
  for (int i = 0; i < s.queued; i++) s.queue[i].left -= s.queue[i].left > 0;
  for (int i = 0; i < clients; i++)
    if (s.client[i].rest > 0 && --s.client[i].rest == 0) s.client[i].kept = 0;
}

void check_progress(State s) {
  int waiting = 0, served = 0;
  for (int i = 0; i < clients; i++) {
    Client& c = s.client[i];
    c.unsure |= c.kind != kNone;
    forget_request(c);
    if (!c.alive) continue;
    s.deaf &= ~(1 << i);
    waiting += c.phase == kWaiting && joins(i);
  }
  int bound = ttl + liveness + clients + 1 + kStepBack * s.stepped;
  bound += kRestFor * static_cast<int>(std::count(kinds.begin(), kinds.end(), 'X'));
  for (int t = 0; t <= bound; t++) {
    for (int i = 0; i < clients; i++) {
      Client& c = s.client[i];
      if (!c.alive) continue;
      if (c.phase == kHolding || c.phase == kLeaving) {
        execute(s, c.rest ? kRest : kRelease, id_of(s, i), c.unsure, c.rest);
        c.phase = kDone;
        c.belief = c.rest = 0;
      } else if (c.phase == kWaiting && joins(i) && acquire(s, id_of(s, i), true) == 1) {
        c.phase = kHolding;
        if (kinds[i] == 'X') c.rest = kRestFor;
        served++;
      }
    }
    if (served == waiting) return;
    tick(s);
  }
  throw Violation{"I8: a waiter was not served in time"};
}

// ---- the search

std::unordered_set<State, Hash, Same> seen;
std::deque<State> open;
uint64_t steps_taken;

void tidy(State& s) {  // states that differ only in what nobody looks at any more are one
  for (int i = 0; i < clients; i++) {
    Client& c = s.client[i];
    if (!c.alive) {
      if (c.executed) forget_request(c);
      if (!c.belief) c.phase = kDone, c.deleted = 0;
      if (!c.kind) c.unsure = 0;
      if (!c.kept) c.rest = 0;
      if (!c.kind && place(s, id_of(s, i)) < 0) s.deaf &= ~(1 << i);
    } else if (c.phase == kIdle || c.phase == kDone) {
      s.deaf &= ~(1 << i);
    }
    if (!c.belief) c.deleted &= c.kind != kNone;
    if (c.kind == kRelease) c.age = c.answer = 0;
    if (c.kind == kRest) c.age = 0;
    if (c.executed && c.answer != 1) c.age = 0;
  }
  int kept = 0;
  for (int i = 0; i < s.strays; i++) {
    Stray t = s.stray[i];
    bool over = s.owner != t.id && ((t.kind == kAcquire && s.tombstones >> t.id & 1) ||
                                    (t.kind == kRenew && s.finished >> t.id & 1));
    if (!over) s.stray[kept++] = t;
  }
  std::fill(s.stray + kept, s.stray + kStrays, Stray{});
  s.strays = kept;
}

void sort_strays(State& s) {
  std::sort(s.stray, s.stray + s.strays, [](const Stray& a, const Stray& b) {
    return std::array{a.kind, a.id, a.tombstone, a.seconds} < std::array{b.kind, b.id, b.tombstone, b.seconds};
  });
}

State renamed(const State& s, const std::array<int, kClients>& to) {
  State r = s;
  auto name = [&](int id) { return static_cast<int8_t>(id < 0 ? id : 2 * to[id / 2] + id % 2); };
  r.tombstones = r.finished = r.deaf = 0;
  for (int i = 0; i < clients; i++) {
    r.client[to[i]] = s.client[i];
    r.tombstones |= (s.tombstones >> 2 * i & 3) << 2 * to[i];
    r.finished |= (s.finished >> 2 * i & 3) << 2 * to[i];
    r.deaf |= (s.deaf >> i & 1) << to[i];
  }
  r.owner = name(s.owner);
  for (int i = 0; i < s.queued; i++) r.queue[i].id = name(s.queue[i].id);
  for (int i = 0; i < s.strays; i++) r.stray[i].id = name(s.stray[i].id);
  return r;
}

State least_of_its_likes(const State& s) {  // clients of one kind are interchangeable
  State least = s;
  sort_strays(least);
  std::array<int, kClients> to{};
  for (int i = 0; i < clients; i++) to[i] = i;
  while (std::next_permutation(to.begin(), to.begin() + clients)) {
    bool alike = true;
    for (int i = 0; i < clients; i++) alike &= kinds[i] == kinds[to[i]];
    if (!alike) continue;
    State other = renamed(s, to);
    sort_strays(other);
    if (std::memcmp(&other, &least, sizeof least) < 0) least = other;
  }
  return least;
}

void reach(State s) {
  steps_taken++;
  tidy(s);
  s = least_of_its_likes(s);
  auto [where, fresh] = seen.insert(s);
  if (!fresh) return;
  check(s);
  if (Hash()(s) % 50 == 0 || clients < 3) check_progress(s);
  open.push_back(s);
}

void time_passes(State s) {
  tick(s);
  for (int i = 0; i < clients; i++) {
    Client& c = s.client[i];
    if (c.kind) c.age = std::min<int>(c.age + 1, ttl);
    if (c.belief > 0 && --c.belief == 0 && c.phase == kHolding) {
      c.unsure |= c.kind != kNone;
      lose(c);
      strand(s, i);
    }
  }
  reach(s);
}

void client_acts(const State& from, int i) {
  State s = from;
  Client& c = s.client[i];
  auto next = [&](auto change) {
    s = from;
    change();
    reach(s);
  };
  if (c.kind && !c.executed) {
    next([&] {
      int answer = execute(s, c.kind, id_of(s, i), c.unsure, c.seconds);
      c.executed = 1;
      c.answer = answer;
    });
    if (from.faults) next([&] {  // executed, and once more at some other time
      s.faults--;
      State before = s;
      strand(s, i);
      c = before.client[i];
      c.answer = execute(s, c.kind, id_of(s, i), c.unsure, c.seconds);
      c.executed = c.unsure = 1;
    });
  }
  if (!from.client[i].alive) return;
  const Client was = from.client[i];
  if (was.phase == kIdle) next([&] {
    c.phase = kWaiting;
    send(c, kAcquire);
  });
  if (!was.kind && was.phase >= kWaiting && was.phase <= kLeaving)
    next([&] { send(c, was.phase == kWaiting ? kAcquire : was.phase == kHolding ? kRenew : kRelease); });
  if (!was.kind && (was.phase == kWaiting || was.phase == kHolding)) next([&] { leave_it(c); });
  if (was.executed) next([&] { understand(s, i); });
  if (was.kind && from.faults) next([&] {  // no answer in time
    s.faults--;
    strand(s, i);
    c.unsure = 1;
  });
  if (was.deleted && was.phase == kHolding) next([&] {  // it is told, or its renewal tells
    c.unsure |= c.kind != kNone;
    strand(s, i);
    lose(c);
  });
  for (int half_open = 0; half_open < 2 && from.crashes; half_open++) next([&] {
    s.crashes--;
    if (!half_open) s.deaf |= 1 << i;
    strand(s, i);
    c.alive = 0;
  });
  if (from.deaf >> i & 1)
    next([&] { s.deaf &= ~(1 << i); });
  else if (from.faults && was.phase == kWaiting)
    next([&] {
      s.faults--;
      s.deaf |= 1 << i;
    });
}

void others_act(const State& from) {
  for (int i = 0; i < from.strays; i++) {
    State s = from;
    Stray t = s.stray[i];
    std::copy(s.stray + i + 1, s.stray + s.strays, s.stray + i);
    s.stray[--s.strays] = {};
    execute(s, t.kind, t.id, t.tombstone, t.seconds);
    reach(s);
  }
  if (from.deletes && from.owner >= 0) {
    State s = from;
    Client& c = s.client[client_of(s.owner)];
    s.deletes--;
    c.deleted = s.owner == id_of(s, client_of(s.owner)) && (c.belief > 0 || c.kind);
    if (c.kept) c.kept = c.rest = 0;
    vacate(s);
    reach(s);
  }
  if (from.steps) {
    State s = from;
    s.steps--;
    s.stepped = 1;
    if (s.owner >= 0) s.left += kStepBack;
    if (s.resting) s.rests_at_most += kStepBack;
    for (int i = 0; i < s.queued; i++)
      if (s.queue[i].left > 0) s.queue[i].left += kStepBack;
    reach(s);
  }
}

int main(int count, char** words) {
  if (count != 10) return std::fputs("see the head of redis_queue.cpp\n", stderr), 2;
  kinds = words[1];
  clients = static_cast<int>(kinds.size());
  ttl = std::atoi(words[6]);
  liveness = std::atoi(words[7]);
  looked_at = std::atoi(words[8]);
  auto known = std::find(std::begin(kMistakes), std::end(kMistakes), std::string_view(words[9]));
  if (known == std::end(kMistakes) || clients > kClients) return std::fputs("no such mistake or size\n", stderr), 2;
  mistake = static_cast<Mistake>(known - std::begin(kMistakes));

  State first{};
  first.owner = -1;
  first.faults = std::atoi(words[2]);
  first.crashes = std::atoi(words[3]);
  first.deletes = std::atoi(words[4]);
  first.steps = std::atoi(words[5]);
  for (int i = 0; i < clients; i++) first.client[i].alive = 1;
  std::string found = "exhausted";
  try {
    reach(first);
    while (!open.empty()) {
      State s = open.front();
      open.pop_front();
      time_passes(s);
      for (int i = 0; i < clients; i++) client_acts(s, i);
      others_act(s);
    }
  } catch (const Violation& violation) {
    found = violation.what;
  }
  std::string arguments;
  for (int i = 1; i < count; i++) arguments += std::string(words[i]) + " ";
  std::printf("%-24s %9zu states %10llu steps: %s\n", arguments.c_str(), seen.size(),
              static_cast<unsigned long long>(steps_taken), found.c_str());
  return found != "exhausted";
}
