// Model of a waiter on etcd who is let in by what its watch tells, without another look.
//
// The transaction that puts its key at revision r also counts who is ahead. One watch of the whole name, from r + 1 on,
// then tells of each deletion, with the create_revision of what was deleted: who is older than r leaves the count. A
// watch tells in order, and of a revision all or nothing. So when the count says that nobody is ahead, it has proved
// that at this revision nobody was, and that the own key had not been deleted up to it; what a look would have said.
//
// Every order of events is tried, with these at will: requests and answers are late or lost, and a lost one is executed
// at any later moment; the member that a watch reads from is behind by as much as it likes; streams break (so does one
// whose past was compacted), and what was deleted is not told; leases run out, which deletes all their keys at one
// revision; clients stop for ever while they believe; an operator deletes a key, or the whole name. After a broken
// stream, a request that was sent again, or a deletion without its past, a waiter looks, and from then on watches whom
// it stands behind and looks again, as without the proof. That a client's validity ends before its lease is taken for
// granted here: a lease ends at any moment, but not while its client knows it to be valid. States are told apart by 64
// bits of a hash.
//
//   etcd <clients> <faults> <crashes> <deletes> <permits> <mistake or ->
//
// A crash may also be a client whose renewals are not answered in time, and who goes on.
// <clients>: a word each, joined by commas; a letter for each attempt, two at most, one after the other: X alone,
// R reads, P takes one of the permits. Prints what it found, and exits with 1 if that is a violation.
//
//   I1  who believe that they hold it fit together, but for those whose key an operator deleted
//   I2  who believes has a lease
//   I3  an id that was given up does not believe
//   I4  who is let in was first of those whom it excludes, at the revision that let it in
//   I5  … and its own key had not been deleted up to it
//   I7  nobody sleeps who fits, has heard all, and knows of nothing to look at
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <vector>

constexpr int kClients = 4, kIds = 2 * kClients, kEvents = 12;

enum Phase : int8_t { kIdle, kJoining, kWaiting, kHolding, kLeaving, kDone };
enum Request : int8_t { kNone, kJoin, kLook, kGiveBack, kCancel };
enum Answer : int8_t { kOpen, kPut, kFound, kRefused, kNoLease, kThere, kGone, kGivenBack };

// What a mistake leaves out or does instead; each must be found.
enum Mistake {
  kCorrect,
  kWatchFromBefore,   // the watch begins before the key was put
  kWatchFromTheAnswer, // … or when the answer came
  kCountsAll,         // who came later is taken for somebody ahead
  kOwnIgnored,        // the own key's deletion does not count
  kHalfARevision,     // let in before all of a revision was read
  kCountsOn,          // after a broken stream it goes on from where the new one begins
  kToldTwice,         // … from the beginning, with the count that it had
  kFoundCounts,       // what a request sent again finds, counts as what it put
  kNoPastNobody,      // a deletion without its past is one of somebody behind
  kFromReceipt,       // validity counts from the push
  kAfterTheCancel,    // a push counts after the claim was given up
  kRejoinKeepsCount,  // a key that is put again goes on with the count of the first
  kOneMore,           // one permit too many
  kLikeExcludes,      // readers are counted as somebody ahead of a reader, but not when they go
};
constexpr const char* kMistakes[] = {"-",        "frombefore", "fromanswer", "countsall",   "ownignored",
                                     "half",     "countson",   "toldtwice",  "foundcounts", "nopast",
                                     "receipt",  "aftercancel", "rejoinkeeps", "onemore",   "likeexcludes"};

struct Client {
  int8_t attempt, phase, alive;
  int8_t unsure;         // some join of this id has no answer
  int8_t valid;          // it knows its lease to be alive
  int8_t proof;          // it counts
  int8_t ahead, like;    // … those whom it excludes, and those who share with it
  int8_t revision;       // of its key, 0: none that it knows
  int8_t seen;           // up to which it has heard
  int8_t watched;        // without a proof: the ids whose end makes it look
  int8_t look;           // it has to
  int8_t gone_at;        // the truth: at which revision the key that it knows was deleted
  int8_t request, answer, answer_revision, answer_born, answer_ahead, answer_like, answer_watched;
};
struct Event {
  int8_t revision, id, born;
};
struct State {
  int8_t revision;
  int8_t born[kIds];        // create_revision of its key, 0: not there
  int8_t stray[kIds];       // a join that nobody waits for any more
  uint8_t ended;            // the leases that have
  uint8_t tombstones, voided, finished;
  int8_t faults, crashes, deletes, events;
  Event event[kEvents];
  Client client[kClients];
};
static_assert(std::has_unique_object_representations_v<State>);

struct Violation {
  const char* what;
};

int clients, permits;
std::vector<std::string> words;
Mistake mistake;

char mode(int id) { return words[id / 2][id % 2]; }
bool fits(int a, int b) { return mode(a) == mode(b) && mode(a) != 'X'; }
int room(int id) { return mode(id) == 'P' ? permits + (mistake == kOneMore) : kIds; }
bool has_lease(const State& s, int c) { return !(s.ended >> c & 1); }
int id_of(const State& s, int c) { return 2 * c + s.client[c].attempt; }

// ---- the server

void erase(State& s, int id) {  // at the present revision
  if (!s.born[id]) return;
  if (s.events == kEvents) throw Violation{"the model has too few events"};
  s.event[s.events++] = {s.revision, static_cast<int8_t>(id), s.born[id]};
  Client& c = s.client[id / 2];
  if (id == id_of(s, id / 2) && c.revision == s.born[id]) c.gone_at = s.revision;
  s.born[id] = 0;
}

void put(State& s, int id) {
  s.born[id] = ++s.revision;
}

int older(const State& s, int id, int than, bool like) {
  int n = 0;
  for (int other = 0; other < kIds; other++)
    n += other != id && s.born[other] && s.born[other] < than && fits(id, other) == like;
  return n;
}

int behind_whom(const State& s, int id) {  // whom it watches: the newest that does not fit, or as many as have room
  std::vector<std::pair<int, int>> others, like;
  for (int other = 0; other < kIds; other++)
    if (other != id && s.born[other] && s.born[other] < s.born[id])
      (fits(id, other) ? like : others).push_back({s.born[other], other});
  if (!others.empty()) return 1 << std::max_element(others.begin(), others.end())->second;
  std::sort(like.rbegin(), like.rend());
  int mask = 0;
  if (static_cast<int>(like.size()) >= room(id))
    for (int i = 0; i < room(id); i++) mask |= 1 << like[i].second;
  return mask;
}

void execute(State& s, int c) {
  Client& me = s.client[c];
  int id = id_of(s, c);
  switch (me.request) {
    case kJoin:
      if (!has_lease(s, c)) {
        me.answer = kNoLease;
      } else if (s.born[id]) {
        me.answer = kFound;
      } else if (s.tombstones >> id & 1) {
        me.answer = kRefused;
      } else {
        put(s, id);
        me.answer = kPut;
      }
      me.answer_born = s.born[id];
      break;
    case kLook:
      me.answer = s.born[id] && s.born[id] == me.revision ? kThere : kGone;
      break;
    case kCancel:
      if (has_lease(s, c)) s.tombstones |= 1 << id;
      [[fallthrough]];
    case kGiveBack:
      if (s.born[id]) {
        s.revision++;
        erase(s, id);
      }
      me.answer = kGivenBack;
      break;
  }
  me.answer_revision = s.revision;
  if (me.answer == kPut || me.answer == kFound || me.answer == kThere) {
    bool all = me.answer == kFound;  // its count does not stop at the own key
    me.answer_ahead = static_cast<int8_t>(older(s, id, all ? 127 : s.born[id], false));
    me.answer_like = static_cast<int8_t>(older(s, id, all ? 127 : s.born[id], true));
    me.answer_watched = static_cast<int8_t>(behind_whom(s, id));
  }
}

// ---- the client

void next_attempt(State& s, int c) {
  Client& me = s.client[c];
  s.finished |= 1 << id_of(s, c);
  int8_t attempt = me.attempt + 1, valid = me.valid;
  bool more = attempt < static_cast<int>(words[c].size());
  me = {};
  me.alive = 1;
  me.attempt = more ? attempt : attempt - 1;
  me.phase = more ? kIdle : kDone;
  me.valid = valid;
}

void ask(Client& me, Request request) {
  me.request = request;
  me.answer = kOpen;
  me.answer_revision = me.answer_born = me.answer_ahead = me.answer_like = me.answer_watched = 0;
}

void leave(Client& me) {
  if (me.request == kJoin) me.unsure = 1;
  me.phase = kLeaving;
  if (mistake != kAfterTheCancel) me.proof = 0;
  me.watched = me.look = 0;
  ask(me, me.unsure ? kCancel : kGiveBack);
}

void believe(State& s, int c, int at, bool pushed) {
  Client& me = s.client[c];
  int id = id_of(s, c);
  if (me.phase == kLeaving || s.finished >> id & 1) throw Violation{"I3: an id that was given up believes"};
  if (me.gone_at && me.gone_at <= at) throw Violation{"I5: its own key had been deleted"};
  int others = 0, like = 0;
  for (int other = 0; other < kIds; other++)
    if (other != id && s.born[other] && s.born[other] < me.revision) (fits(id, other) ? like : others)++;
  for (int i = 0; i < s.events; i++)
    if (const Event& e = s.event[i]; e.id != id && e.born < me.revision && e.revision > at)
      (fits(id, e.id) ? like : others)++;
  if (others || (mode(id) == 'P' && like >= permits)) throw Violation{"I4: somebody whom it excludes was ahead"};
  if (!me.gone_at) s.voided &= ~(1 << id);
  if (pushed && mistake == kFromReceipt) me.valid = 1;
  me.phase = kHolding;
  me.proof = 0;
  me.look = me.watched = 0;
}

void answered(State& s, int c) {
  Client& me = s.client[c];
  Answer answer = static_cast<Answer>(me.answer);
  me.request = kNone;
  switch (answer) {
    case kPut:
      if (!(mistake == kRejoinKeepsCount && me.proof)) {
        me.ahead = me.answer_ahead;
        me.like = me.answer_like;
      }
      me.revision = me.answer_born;
      me.gone_at = 0;
      if (s.born[2 * c + me.attempt] != me.revision)  // deleted meanwhile
        for (int i = 0; i < s.events; i++)
          if (s.event[i].id == id_of(s, c) && s.event[i].born == me.revision) me.gone_at = s.event[i].revision;
      me.seen = mistake == kWatchFromBefore ? 0 : mistake == kWatchFromTheAnswer ? s.revision : me.answer_revision;
      me.phase = kWaiting;
      me.proof = 1;
      me.look = me.watched = 0;
      if (mistake == kLikeExcludes && mode(id_of(s, c)) == 'R') me.ahead += me.like;
      if (!me.ahead && me.like < room(id_of(s, c))) {
        if (me.valid)
          believe(s, c, me.answer_revision, false);
        else
          me.proof = 0, me.look = 1;
      }
      break;
    case kFound:
      me.phase = kWaiting;
      me.revision = me.answer_born;
      me.gone_at = 0;
      if (s.born[id_of(s, c)] != me.revision)
        for (int i = 0; i < s.events; i++)
          if (s.event[i].id == id_of(s, c) && s.event[i].born == me.revision) me.gone_at = s.event[i].revision;
      me.proof = mistake == kFoundCounts;
      me.ahead = me.answer_ahead;
      me.like = me.answer_like;
      me.seen = me.answer_revision;
      me.look = !me.proof;
      me.watched = 0;
      break;
    case kThere: {
      bool free = !me.answer_watched;
      if (free && me.valid) {
        believe(s, c, me.answer_revision, false);
      } else {
        me.proof = 0;
        me.seen = me.answer_revision;
        me.watched = static_cast<int8_t>(me.answer_watched | 1 << id_of(s, c));
        me.look = free;
      }
      break;
    }
    case kGone:  // it joins again, under the same id
      me.phase = kJoining;
      if (mistake != kRejoinKeepsCount) me.proof = 0;
      me.look = me.watched = 0;
      ask(me, kJoin);
      break;
    case kNoLease:
    case kRefused:
      next_attempt(s, c);
      break;
    case kGivenBack:
      next_attempt(s, c);
      break;
    case kOpen:
      break;
  }
}

void hear(State& s, int c, bool past) {  // the next revision of its watch
  Client& me = s.client[c];
  int id = id_of(s, c), at = 0;
  for (int i = 0; i < s.events && !at; i++)
    if (s.event[i].revision > me.seen) at = s.event[i].revision;
  bool own = false, hit = false;
  for (int i = 0; i < s.events; i++) {
    const Event& e = s.event[i];
    if (e.revision != at) continue;
    if (e.id == id && e.born == me.revision) {
      own = mistake != kOwnIgnored;
    } else if (!past && mistake == kNoPastNobody) {
      continue;
    } else if (e.born < me.revision || mistake == kCountsAll) {
      if (fits(id, e.id))
        me.like--;
      else
        me.ahead--;
    }
    hit |= me.watched >> e.id & 1;
    if (mistake == kHalfARevision && me.proof && !own && me.ahead <= 0 && me.like < room(id) && me.phase == kWaiting &&
        me.valid)
      return believe(s, c, at, true);
  }
  me.seen = static_cast<int8_t>(at);
  if (!me.proof) {
    if (hit && me.phase == kWaiting) me.look = 1;
  } else if ((!past && mistake != kNoPastNobody) || (own && me.phase == kWaiting)) {
    me.proof = mistake == kRejoinKeepsCount && own;
    me.look = 1;
  } else if (me.ahead <= 0 && me.like < room(id)) {
    if (me.valid || mistake == kFromReceipt)
      believe(s, c, at, true);
    else
      me.proof = 0, me.look = 1;  // the lease is renewed first
  }
}

// ---- what must hold

void check(const State& s) {
  std::vector<int> believers;
  for (int c = 0; c < clients; c++) {
    const Client& me = s.client[c];
    int id = id_of(s, c);
    if (me.phase == kHolding && me.valid && !(s.voided >> id & 1)) {
      believers.push_back(id);
      if (!has_lease(s, c)) throw Violation{"I2: believes without a lease"};
    }
    bool asleep = me.alive && me.phase == kWaiting && !me.request && !me.look;
    if (asleep && s.born[id] && s.born[id] == me.revision && (!s.events || s.event[s.events - 1].revision <= me.seen) &&
        !older(s, id, me.revision, false) && (mode(id) != 'P' || older(s, id, me.revision, true) < permits))
      throw Violation{"I7: it sleeps, and fits"};
  }
  for (int a : believers) {
    int like = 0;
    for (int b : believers) {
      if (a != b && !fits(a, b)) throw Violation{"I1: two believe who exclude each other"};
      like += a != b;
    }
    if (mode(a) == 'P' && like >= permits) throw Violation{"I1: more permits than there are"};
  }
}

// ---- all states

bool listens(const Client& me) {
  return (me.phase == kWaiting && (me.proof || me.watched)) || (me.phase == kLeaving && me.proof);
}

void forget(State& s) {  // what nobody asks for any more
  int heard = s.revision;
  for (int c = 0; c < clients; c++) {
    Client& me = s.client[c];
    if (!me.request) me.answer = kOpen;
    if (!me.request || !me.answer)
      me.answer_revision = me.answer_born = me.answer_ahead = me.answer_like = me.answer_watched = 0;
    if (!me.proof) me.ahead = me.like = 0;
    if (!listens(me)) me.seen = 0;
    if (me.phase == kHolding || me.phase == kLeaving) me.gone_at = 0;
    if (me.phase == kHolding && (mistake != kRejoinKeepsCount)) me.revision = 0;
    if (!me.alive) me.look = me.watched = me.proof = 0;
    if (listens(me)) heard = std::min<int>(heard, me.seen);
    if (me.request && me.answer) heard = std::min<int>(heard, me.answer_revision);
    bool there = s.stray[2 * c] || s.stray[2 * c + 1] || s.born[2 * c] || s.born[2 * c + 1];
    if (me.phase == kDone && !there) s.ended |= 1 << c;
    if (me.phase == kDone) me.valid = 0;
    if (!has_lease(s, c)) s.stray[2 * c] = s.stray[2 * c + 1] = 0;
  }
  if (mistake == kWatchFromBefore || mistake == kToldTwice) heard = 0;
  int kept = 0;
  for (int i = 0; i < s.events; i++)
    if (s.event[i].revision > heard) s.event[kept++] = s.event[i];
  for (int i = kept; i < s.events; i++) s.event[i] = {};
  s.events = static_cast<int8_t>(kept);
}

template <class Do>
void each_revision(State& s, Do act) {
  act(s.revision);
  for (int8_t& born : s.born) act(born);
  for (int i = 0; i < s.events; i++) act(s.event[i].revision), act(s.event[i].born);
  for (Client& me : s.client)
    act(me.revision), act(me.seen), act(me.gone_at), act(me.answer_revision), act(me.answer_born);
}

void renumber(State& s) {  // only their order counts
  int8_t rank[128] = {}, next = 0;
  each_revision(s, [&](int8_t& revision) { rank[revision] = 1; });
  rank[0] = 0;
  for (int i = 1; i < 128; i++)
    if (rank[i]) rank[i] = ++next;
  each_revision(s, [&](int8_t& revision) { revision = rank[revision]; });
}

struct Search {
  std::unordered_set<uint64_t> known;
  std::deque<State> open;

  void add(State s) {
    check(s);
    forget(s);
    renumber(s);
    uint64_t hash = 1469598103934665603u;
    const auto* bytes = reinterpret_cast<const unsigned char*>(&s);
    for (size_t i = 0; i < sizeof s; i++) hash = (hash ^ bytes[i]) * 1099511628211u;
    hash ^= hash >> 29;
    if (known.insert(hash).second) open.push_back(s);
  }

  void from(const State& s) {
    for (int c = 0; c < clients; c++) of_client(s, c);
    for (int id = 0; id < kIds; id++)
      if (s.stray[id]) {
        State n = s;
        n.stray[id] = 0;
        if (has_lease(n, id / 2) && !n.born[id] && !(n.tombstones >> id & 1)) put(n, id);
        add(n);
      }
    for (int c = 0; c < clients; c++)
      if (has_lease(s, c) && !s.client[c].valid) {
        State n = s;
        n.ended |= 1 << c;
        n.revision++;
        erase(n, 2 * c), erase(n, 2 * c + 1);
        add(n);
      }
    if (s.deletes) {
      State all = s;
      all.deletes--, all.revision++;
      for (int id = 0; id < kIds; id++)
        if (s.born[id]) {
          State n = s;
          n.deletes--, n.revision++;
          n.voided |= 1 << id;
          erase(n, id);
          add(n);
          all.voided |= 1 << id;
          erase(all, id);
        }
      add(all);
    }
  }

  void of_client(const State& s, int c) {
    const Client& me = s.client[c];
    int id = id_of(s, c);
    if (me.request && !me.answer) {  // also if its client has stopped
      State n = s;
      execute(n, c);
      add(n);
    }
    if (me.valid && me.phase != kIdle && me.phase != kDone && (s.crashes || !me.alive)) {  // no renewal came in time
      State n = s;
      n.crashes -= me.alive;
      n.client[c].valid = 0;
      add(n);
    }
    if (!me.alive) return;
    if (s.crashes && me.phase != kIdle && me.phase != kDone) {
      State n = s;
      n.crashes--;
      n.client[c].alive = 0;
      add(n);
    }
    if (me.phase == kDone) return;
    if (me.request && me.answer) {
      State n = s;
      answered(n, c);
      add(n);
    }
    if (me.request && s.faults) {  // it is lost, or its answer
      State n = s;
      n.faults--;
      Client& mine = n.client[c];
      if (!me.answer && me.request == kJoin) n.stray[id] = 1;
      if (me.request == kJoin) mine.unsure = 1;
      ask(mine, me.request == kGiveBack ? kCancel : static_cast<Request>(me.request));  // sent again
      add(n);
    }
    if (!me.valid && has_lease(s, c) && me.phase != kHolding) {  // one was; what was lost stays lost
      State n = s;
      n.client[c].valid = 1;
      add(n);
    }
    if (me.phase == kIdle && has_lease(s, c)) {
      State n = s;
      n.client[c].phase = kJoining;
      ask(n.client[c], kJoin);
      add(n);
    }
    if (me.phase == kJoining || me.phase == kWaiting || me.phase == kHolding) {  // gives up, gives back, has lost it
      State n = s;
      leave(n.client[c]);
      if (me.request == kJoin && !me.answer) n.stray[id] = 1;
      add(n);
    }
    if (me.phase == kWaiting && !me.request && me.look) {
      State n = s;
      n.client[c].look = 0;
      ask(n.client[c], kLook);
      add(n);
    }
    if (listens(me) && s.events && s.event[s.events - 1].revision > me.seen) {
      State n = s;
      hear(n, c, true);
      add(n);
      if (s.faults && me.proof) {
        State without = s;
        without.faults--;
        hear(without, c, false);
        add(without);
      }
    }
    if (me.phase == kWaiting && s.faults) {  // its stream breaks
      State n = s;
      Client& mine = n.client[c];
      n.faults--;
      if (mistake == kCountsOn) {
        mine.seen = s.revision;
      } else if (mistake == kToldTwice) {
        mine.seen = mine.revision;
      } else {
        mine.proof = mine.watched = 0;
        mine.look = 1;
      }
      add(n);
    }
  }
};

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  std::string word;
  for (const char* p = argv[1];; p++)
    if (*p == ',' || !*p) {
      words.push_back(word);
      word.clear();
      if (!*p) break;
    } else {
      word += *p;
    }
  clients = static_cast<int>(words.size());
  State first = {};
  first.faults = static_cast<int8_t>(std::atoi(argv[2]));
  first.crashes = static_cast<int8_t>(std::atoi(argv[3]));
  first.deletes = static_cast<int8_t>(std::atoi(argv[4]));
  permits = std::atoi(argv[5]);
  while (mistake < static_cast<int>(std::size(kMistakes)) && std::string_view(kMistakes[mistake]) != argv[6])
    mistake = static_cast<Mistake>(mistake + 1);
  if (mistake == static_cast<int>(std::size(kMistakes)) || clients > kClients) return 2;
  for (int c = 0; c < kClients; c++) {
    if (c >= clients) first.ended |= 1 << c;
    first.client[c].alive = c < clients;
    first.client[c].valid = c < clients;
  }
  Search search;
  try {
    search.add(first);
    while (!search.open.empty()) {
      State s = search.open.front();
      search.open.pop_front();
      search.from(s);
    }
  } catch (const Violation& found) {
    std::printf("%s %s: %s, after %zu states\n", argv[1], argv[6], found.what, search.known.size());
    return 1;
  }
  std::printf("%s %s %s %s: holds, %zu states\n", argv[1], argv[2], argv[3], argv[4], search.known.size());
  return 0;
}
