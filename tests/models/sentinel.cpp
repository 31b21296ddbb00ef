// Model of the primary that one client follows, given the replies of three Sentinels.
//
// Every order of events is tried. At any moment:
//   - a Sentinel leads a failover, and the others learn of it one by one;
//   - one Sentinel or all of them are created again (epoch 0, at the very first primary or at the present one);
//   - an operator moves one Sentinel, or all, to another primary (REMOVE, MONITOR: epoch 0);
//   - a Sentinel is isolated from the others and keeps its view, and later it returns;
//   - a Sentinel does not reply to this client for a while;
//   - a reply is late, and the client has asked that Sentinel again meanwhile.
// Time is counted in ticks. Within one tick, Sentinels that reach each other have exchanged their views. Within kRound
// ticks the client asks each address.
//
//     sentinel <own or name> <failovers> <made anew> <moves> <cut off> <silent> <late> <mistake or ->
//
// own: the client reaches each Sentinel at its own address (it was in the URL, or another Sentinel named it).
// name: only one name leads to all Sentinels. Each new connection reaches any one of them. So a reply of one Sentinel
// replaces no reply of another, and Sentinels are distinguished by their ids.
//
// The client's treatment of a reply is in `note` and `decide`, as in multilock_redis/followed_primary.py. The program prints
// what it found, and exits with 1 if that is a violation.
//
//   S1  if the client reaches a Sentinel that has known a greater epoch for a round, it does not follow a lower one
//   S2  the client does not go to a lower epoch while a Sentinel still names the primary, if the client has reached
//       that Sentinel for a round, or if that Sentinel led the failover and was in touch with the others all the time
//   S3  the client leaves a primary for one of no greater epoch only if as many Sentinels name it as a failover needs
//   S4  the client ignores a reply that comes after the reply to a later request to the same Sentinel
//   L   if nothing changes for kBound ticks, and two of the Sentinels that the client reaches name one primary with the
//       greatest epoch there is, then the client follows that primary
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string_view>
#include <type_traits>
#include <unordered_set>

constexpr int kSentinels = 3, kNeeded = 2, kPrimaries = 3;
constexpr int kRound = 2, kCounts = 3, kBound = 2 * kCounts + 3 * kRound, kEpochs = 4;

struct Violation {
  const char* what;
};

const char* mistake = "-";
bool own, forever, dial_only, url_entries, one_answer, unwatched, one_asked, last_speaks, kept, hasty, twice, late_counts,
    one_round;

struct Opinion {
  int8_t epoch, primary;
  int8_t history;  // the event that created it, known only to this model
  bool operator==(const Opinion&) const = default;
};
struct Guard {
  Opinion knows;
  int8_t id;     // a new id when the Sentinel is created again
  int8_t cut;    // isolated from the other Sentinels
  int8_t silent; // does not reply to this client
  int8_t held;   // ticks since any of these fields changed
  int8_t joined; // ticks since it was last isolated
  int8_t led;    // the newest failover that it knows
};
struct Answer {
  Opinion says;
  int8_t id;
  int8_t known, age, after;  // after: it was asked since the doubt began
};
struct Late {
  Opinion says;
  int8_t id;
  int8_t flies, overtaken, before;  // before: it was asked before the doubt began
};
struct Seat {  // one Sentinel, and the client's replies from it
  Guard guard;
  Answer answer, former;  // former: a reply with its previous id
  Late late;
  int8_t asked;  // ticks since it was asked
};
struct State {
  Seat seat[kSentinels];
  Opinion follows;
  int8_t any, doubts;  // doubts: 1 and the ticks since they began
  int8_t failovers, anew, moves, cuts, silences, lates, histories;
  int8_t steady;  // ticks since anything changed at the Sentinels
};
static_assert(std::has_unique_object_representations_v<State>);

uint64_t hash_of(const State& s) {
  const auto* data = reinterpret_cast<const uint8_t*>(&s);
  uint64_t h = 0x9E3779B97F4A7C15;
  for (size_t i = 0; i < sizeof s; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data + i, std::min<size_t>(8, sizeof s - i));
    h = (h ^ word) * 0xff51afd7ed558ccd;
    h ^= h >> 29;
  }
  h *= 0xc4ceb9fe1a85ec53;
  return h ^ h >> 32;
}

// ---- the client

template <class Do>
void each_answer(State& s, Do action) {
  for (Seat& seat : s.seat)
    for (Answer* each : {&seat.answer, &seat.former})
      if (each->known) action(*each);
}

bool same(const Opinion& a, const Opinion& b) { return a.epoch == b.epoch && a.primary == b.primary; }

void leave_for(State& s, const Opinion& to, int named) {
  for (const auto& [guard, answer, former, late, asked] : s.seat)
    if (to.epoch < s.follows.epoch && guard.knows == s.follows &&
        (guard.held > kRound ? !guard.silent || guard.joined > kRound
                                                         : guard.led && guard.joined > kRound))
      throw Violation{"S2 the client leaves a primary that a Sentinel still names"};
  if (named < kNeeded) throw Violation{"S3 too few Sentinels name the primary that the client goes to"};
  s.follows = to;
  s.doubts = 0;
}

void decide(State& s, const Answer& heard) {
  const Opinion& says = heard.says;
  if (!s.any || says.epoch > s.follows.epoch) {
    s.follows = says;
    s.any = 1;
    s.doubts = 0;
    return;
  }
  if (same(says, s.follows)) {
    s.follows.history = std::max(s.follows.history, says.history);
  } else if (one_answer || (last_speaks && says.epoch == s.follows.epoch)) {
    s.follows = says;
    return;
  }
  if (forever || dial_only || url_entries) return;
  int support = 0, rivals = 0, best = 0, answered = 0;
  each_answer(s, [&](Answer& each) {
    answered += each.after;
    support += same(each.says, s.follows);
    rivals += each.says.epoch == s.follows.epoch && each.says.primary != s.follows.primary;
    best = std::max<int>(best, each.says.epoch);
  });
  if (support && !rivals) {
    s.doubts = 0;
    return;
  }
  if (!s.doubts) {
    s.doubts = 1;
    each_answer(s, [](Answer& each) { each.after = one_round; });
    for (Seat& seat : s.seat) seat.late.before = seat.late.flies;
    if (!one_round) return;
  }
  if (answered < kSentinels && s.doubts <= kCounts && !hasty) return;  // a Sentinel that has not replied may know more
  for (int primary = 0; primary < kPrimaries; primary++) {
    int named = 0, really = 0;
    Opinion to{};
    each_answer(s, [&](Answer& each) {
      if (each.says.epoch != best || each.says.primary != primary || !each.after) return;
      named += twice ? 2 : 1;
      really++;
      to = each.says;
    });
    if (named >= kNeeded && named > support && !same(to, s.follows)) return leave_for(s, to, really);
  }
}

void expire(State& s) {
  each_answer(s, [](Answer& each) {
    if (each.age >= kCounts && !kept) each = {};
  });
}

void note(State& s, int i, const Opinion& says, int id, bool late) {
  Answer& at = s.seat[i].answer;
  bool overtaken = late && s.seat[i].late.overtaken, before = late && s.seat[i].late.before;
  if (late) s.seat[i].late = {};
  if (overtaken && !late_counts) return;
  if (!own && at.known && at.id != id) s.seat[i].former = at;
  at = {says, static_cast<int8_t>(id), 1, 0, static_cast<int8_t>((s.doubts || one_round) && !before)};
  if (s.seat[i].late.flies) s.seat[i].late.overtaken = 1;
  s.seat[i].asked = 0;
  expire(s);
  Opinion followed = s.follows;
  decide(s, Answer(at));
  if (overtaken && s.follows != followed) throw Violation{"S4 the client follows an answer that another one has overtaken"};
}

// ---- all possible next states

std::unordered_set<uint64_t> seen;
std::deque<State> open;

void reach(State s) {
  if (!one_asked)  // the Sentinels are alike
    std::sort(s.seat, s.seat + kSentinels,
              [](const Seat& a, const Seat& b) { return std::memcmp(&a, &b, sizeof(Seat)) < 0; });
  if (seen.insert(hash_of(s)).second) open.push_back(s);
}

void changed(State& s, int i) { s.seat[i].guard.held = s.steady = 0; }

void become(State& s, int i, Opinion knows) {
  s.seat[i].guard.knows = knows;
  s.seat[i].guard.led = 0;
  changed(s, i);
}

int newest(const State& s) {  // the newest view of those that reach each other
  int best = -1;
  for (int i = 0; i < kSentinels; i++)
    if (!s.seat[i].guard.cut && (best < 0 || s.seat[i].guard.knows.epoch > s.seat[best].guard.knows.epoch)) best = i;
  return best;
}

void sentinels_act(const State& s) {
  int together = 0;
  for (const Seat& seat : s.seat) together += !seat.guard.cut;
  int best = newest(s);
  for (int i = 0; i < kSentinels; i++) {
    const Guard& at = s.seat[i].guard;
    if (!at.cut && at.knows.epoch < s.seat[best].guard.knows.epoch) {
      State n = s;
      become(n, i, s.seat[best].guard.knows);
      reach(n);
    }
    if (s.failovers && !at.cut && together >= kNeeded && s.seat[best].guard.knows.epoch < kEpochs) {
      State n = s;
      n.failovers--;
      Opinion to = s.seat[best].guard.knows;
      to.epoch++;
      to.history = ++n.histories;
      to.primary = static_cast<int8_t>((to.primary + 1) % kPrimaries);
      become(n, i, to);
      n.seat[i].guard.led = 1;
      reach(n);
    }
    if (s.anew)
      for (int8_t primary : {int8_t{0}, at.knows.primary}) {
        State n = s;
        n.anew--;
        n.seat[i].guard.id++;
        become(n, i, {0, primary, ++n.histories});
        reach(n);
      }
    if (s.moves)
      for (int8_t primary = 0; primary < kPrimaries; primary++) {
        State n = s;
        n.moves--;
        become(n, i, {0, primary, ++n.histories});
        reach(n);
      }
    if (at.cut || s.cuts) {
      State n = s;
      n.cuts = static_cast<int8_t>(n.cuts - !at.cut);
      n.seat[i].guard.cut = !at.cut;
      n.seat[i].guard.joined = 0;
      changed(n, i);
      reach(n);
    }
    if (at.silent || s.silences) {
      State n = s;
      n.silences = static_cast<int8_t>(n.silences - !at.silent);
      n.seat[i].guard.silent = !at.silent;
      changed(n, i);
      reach(n);
    }
  }
  for (int8_t primary = 0; primary < kPrimaries; primary++)
    for (bool anew : {true, false}) {
      if (!(anew ? s.anew : s.moves)) continue;
      State n = s;
      (anew ? n.anew : n.moves)--;
      n.histories++;
      for (int i = 0; i < kSentinels; i++) {
        n.seat[i].guard.id = static_cast<int8_t>(n.seat[i].guard.id + anew);
        become(n, i, {0, primary, n.histories});
      }
      reach(n);
    }
}

void client_acts(const State& s) {
  for (int i = 0; i < kSentinels; i++) {
    const Guard& at = s.seat[i].guard;
    if (one_asked && i) continue;
    State n = s;
    if (!at.silent) {
      note(n, i, at.knows, at.id, false);
      reach(n);
      if (s.lates && !s.seat[i].late.flies) {
        n = s;
        n.lates--;
        n.seat[i].late = {at.knows, at.id, 1, 0, 0};
        reach(n);
      }
    } else if (own) {
      n.seat[i].asked = 0;
      if (!kept) n.seat[i].answer = {};
      reach(n);
    }
    if (s.seat[i].late.flies) {
      n = s;
      note(n, i, s.seat[i].late.says, s.seat[i].late.id, true);
      reach(n);
      n = s;
      n.seat[i].late = {};
      reach(n);
    }
  }
  if (dial_only && s.any) {  // a new connection: all are asked, and all their replies are old
    bool behind = true;
    for (const Seat& seat : s.seat) behind &= !seat.guard.silent && seat.guard.knows.epoch < s.follows.epoch;
    if (behind) {
      State n = s;
      leave_for(n, s.seat[0].guard.knows, kNeeded);
      reach(n);
    }
  }
  if (url_entries && s.any)  // a new connection: all Sentinels of the URL, which is one name
    for (const Seat& seat : s.seat)
      if (!seat.guard.silent && seat.guard.knows.epoch < s.follows.epoch) {
        State n = s;
        leave_for(n, seat.guard.knows, kNeeded);
        reach(n);
      }
}

void check(const State& s) {
  int best = -1, named[kPrimaries] = {};
  for (const Seat& seat : s.seat) {
    const Guard& each = seat.guard;
    if (each.silent) continue;
    if (each.held > kRound && (!s.any || s.follows.epoch < each.knows.epoch))
      throw Violation{"S1 the client does not follow what a Sentinel has known for long"};
    best = std::max<int>(best, each.knows.epoch);
  }
  if (s.steady < kBound) return;
  for (const Seat& seat : s.seat)
    if (!seat.guard.silent && seat.guard.knows.epoch == best) named[seat.guard.knows.primary]++;
  for (int primary = 0; primary < kPrimaries; primary++)
    if (named[primary] >= kNeeded && !(s.any && s.follows.epoch == best && s.follows.primary == primary))
      throw Violation{"L the client does not follow what the Sentinels agree on"};
}

void time_passes(const State& s) {
  State n = s;
  int best = newest(s);
  for (int i = 0; i < kSentinels; i++) {
    Guard& at = n.seat[i].guard;
    if (s.seat[i].late.flies) return;
    if (!at.cut && at.knows.epoch < s.seat[best].guard.knows.epoch) return;
    bool is_asked = (own || !at.silent) && !unwatched && !(one_asked && i);
    if (is_asked && s.seat[i].asked >= kRound) return;
    n.seat[i].asked = static_cast<int8_t>(is_asked ? s.seat[i].asked + 1 : 0);
    at.held = static_cast<int8_t>(std::min(at.held + 1, kRound + 1));
    at.joined = static_cast<int8_t>(at.cut ? 0 : std::min(at.joined + 1, kRound + 1));
  }
  each_answer(n, [](Answer& each) { each.age = static_cast<int8_t>(std::min(each.age + 1, kCounts)); });
  if (n.doubts) n.doubts = static_cast<int8_t>(std::min(n.doubts + 1, kCounts + 1));
  n.steady = static_cast<int8_t>(std::min(n.steady + 1, kBound));
  check(n);
  reach(n);
}

int main(int count, char** given) {
  if (count != 9) return std::fputs("see the head of sentinel.cpp\n", stderr), 2;
  own = std::string_view(given[1]) == "own";
  mistake = given[8];
  struct {
    const char* name;
    bool* on;
  } mistakes[] = {{"forever", &forever},   {"dialonly", &dial_only},  {"urlentries", &url_entries},
                  {"oneanswer", &one_answer}, {"unwatched", &unwatched}, {"oneasked", &one_asked},
                  {"lastspeaks", &last_speaks}, {"kept", &kept},        {"hasty", &hasty},
                  {"twice", &twice},       {"latecounts", &late_counts}, {"oneround", &one_round}};
  bool known = std::string_view(mistake) == "-";
  for (auto& each : mistakes)
    if (std::string_view(mistake) == each.name) known = *each.on = true;
  if (!known) return std::fputs("no such mistake\n", stderr), 2;
  auto number = [&](int i) { return static_cast<int8_t>(std::atoi(given[i])); };
  State first{};
  first.failovers = number(2), first.anew = number(3), first.moves = number(4), first.cuts = number(5);
  first.silences = number(6), first.lates = number(7);
  for (Seat& seat : first.seat) seat.guard.knows = {1, 0, 0}, seat.guard.joined = kRound + 1;
  const char* found = "exhausted";
  try {
    reach(first);
    while (!open.empty()) {
      State s = open.front();
      open.pop_front();
      time_passes(s);
      sentinels_act(s);
      client_acts(s);
    }
  } catch (const Violation& violation) {
    found = violation.what;
  }
  std::printf("sentinel");
  for (int i = 1; i < count; i++) std::printf(" %s", given[i]);
  std::printf(" %9zu states: %s\n", seen.size(), found);
  return std::string_view(found) != "exhausted";
}
