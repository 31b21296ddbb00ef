// Model of the lock on one Redis: the rules of the clients, the scripts acquire, share, renew, renew_shared, release,
// rest and force, and their common part (pass).
//
// Every order of events is tried. At any moment:
//   - a request or a reply is late or lost, or a request is executed twice;
//   - a client stops forever (its subscription ends with it, or stays half open);
//   - a subscription breaks, and returns;
//   - an operator deletes the key, which leaves `holders` behind, or forces a release;
//   - the server's clock is stepped back.
// Time is stored as the ticks that are left until each deadline, so no run is bounded in time. The push of a hand-over
// is a grant. It is based on one request of the waiter, which set the waiter's deadline, and it lasts until that
// deadline. This time is counted from the sending of that request. So each request of a waiter contains the time of its
// sending (`echo`). The server stores the echo together with the deadline that the same request set, and returns it
// with the push. A push arrives at any moment until then, or never. A push without an echo is a hint: the client asks
// the server after it. A client may ask at any moment in any case, so hints need no state. A client without a
// subscription may say so with any request (`quietly`). Then the server does not take it for dead because of the
// missing subscription, and no push is a grant. States are compared by a hash of 64 bits.
//
//     redis <clients> <faults> <crashes> <deletes> <steps back> <ttl> <liveness> <permits> <looked at> <at once>
//           <mistake or ->
//
// <clients>: a word for each, joined by commas. Each letter is an attempt, two at most, one after the other:
//   X      is exclusive (a lock, a leader, a writer)
//   R      is a reader, beside other readers
//   P      takes one of the permits
//   x r p  try once, without joining the queue
//   H L    as X and P, but let the name rest at the end (hold_at_least)
//   N C    as X and P, but each push is only a hint: it is not renewed (renew=False), or it must wait for a reply
// <looked at>: how many waiters that do not listen one script skips at most.
// <at once>: how many waiters one script makes holders; 0 means as many as may hold together.
//
// The program prints what it found, and exits with 1 if that is a violation.
//
//   I1  all claims that believe that they hold may hold together, except those whose key an operator deleted
//   I2  a client that believes holds the lock at the server, for at least as long
//   I3  an id whose release or cancel got a reply neither holds nor waits
//   I4  no waiter is overtaken that is alive and listens, or has said that it cannot listen, whatever its kind
//   I5  a token of X is greater than all before it; a token of R or P is greater than each of an X before it
//   I6  a lock that an operator deleted is not renewed
//   I7  after a release or cancel no waiter is left that the script could check, is alive, listens, and could hold
//   I8  all holders at the server may hold together
//   I9  a rest ends at the time that its first execution set, or earlier: no request starts it again or extends it
//   I10 a resting name goes to nobody before the end that its holder asked for, except by an operator
//   I11 a grant by hand-over ends with the deadline of the waiter's own request, even if the clock was stepped back
//   I12 nothing is handed over to a client that certainly does not listen, and has not said so
//   I13 N and C hold only by a reply, so from the beginning for a whole ttl
//   P   all waiters are served within ttl + liveness + clients + 1 ticks (and a rest for each H and L), even if every
//       push is lost
#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

constexpr int kClients = 4, kIds = 2 * kClients, kQueue = kIds, kStrays = 6, kPushes = 6, kStepBack = 3, kRestFor = 3;
constexpr int kNobody = -1, kShared = -2;  // owners that are not ids
constexpr int kQuiet = -1;                 // stands in the place of an echo

enum Phase : int8_t { kIdle, kWaiting, kHolding, kLeaving, kDone };
enum Request : int8_t { kNone, kAcquire, kRenew, kRelease, kRest };

// What each mistake leaves out or does instead. The search must find each of them.
enum Mistake {
  kCorrect,
  kNobodyAtTheLimit,    // a waiter beyond the limit of the search is ignored
  kNoCap,               // a deadline that was set before the clock's step back is believed
  kPublishCounts,       // a subscriber to all channels makes dead waiters look alive
  kFreeIsNotPassedOn,   // only the release of a holder hands over, not one that finds the name free
  kReceipt,             // validity counts from the arrival of the reply
  kPlainDelete,         // a release does not check who holds the lock
  kQueueOnly,           // a cancel removes the place in the queue, not the lock
  kNoTombstone,         // a request that comes after its cancel takes the lock
  kNewcomersFirst,      // a free lock is taken even if others wait
  kDeadStay,            // a waiter that has stopped asking keeps its place
  kWholeTtl,            // a hand-over lasts for a ttl
  kRestKeepsId,         // a resting name still belongs to its id
  kRestLengthens,       // a rest that is sent again, or comes late, sets a new end
  kRestPasses,          // a rest hands over at once, as a release does
  kJoinsReaders,        // a writer enters beside readers
  kKindsMix,            // a permit is taken beside readers
  kOneMore,             // one permit too many
  kDeletesAll,          // a reader's release deletes the lock of all
  kReaderOvertakes,     // a reader joins readers although a writer waits
  kReadersFirst,        // a hand-over also admits readers from the middle of the queue
  kOneReader,           // a hand-over wakes one reader only
  kPermitIsNotPassedOn, // the release of a permit hands over only if it was the last one
  kCancelDoesNotPass,   // if a waiter leaves, the waiters behind it are not admitted
  kHoldersKept,         // a new marker does not delete the former holders
  kRenewsUnlooked,      // a renewal checks the marker, but not `holders`
  kRenewsUnmarked,      // a renewal checks `holders`, but not the marker
  kMarkerEnds,          // the expiry of the marker is not extended for a later holder
  kTokenOfTheWriter,    // a reader's token is that of the last writer
  kPushForATtl,         // a push counts for a ttl from the sending of its request
  kPushUncapped,        // it counts for a liveness although the ttl is shorter, so that a confirmation ends it earlier
  kPushFromReceipt,     // a push counts from its arrival
  kPushFromTheNewest,   // a push counts from the sending of the newest request
  kPushFromTheAnswered, // a push counts from the sending of the newest request with a reply
  kWholeLiveness,       // a hand-over lasts for a liveness from the time at which it is made
  kEchoAlone,           // a request that finds its place in the queue sets the echo, not the deadline
  kPushInBetween,       // a push counts while a request is under way, which is then forgotten
  kPushSettles,         // a push makes the client forget that a request has no reply
  kPushIsAllowed,       // a push to N or C is a grant
  kPushOfAnother,       // a push counts for any claim that its client waits for
  kPushRevives,         // a push counts after its claim was cancelled
  kPushFirst,           // the push is sent before the key is written, and a full memory refuses the write
  kTellsTheSkipped,     // a waiter that does not listen is notified before it is skipped
  kTokenBefore,         // the push carries the previous token
  kQuietIsSkipped,      // a waiter that has said that it cannot be notified is skipped
  kOldPush,             // a push counts although a request that was sent after its own has been refused
};
constexpr const char* kMistakes[] = {
    "-",         "nobody",    "nocap",     "publish",     "freestays",     "receipt",    "plaindelete", "queueonly",
    "notombstone", "newcomers", "deadstay", "wholettl",   "restkeepsid",   "restlengthens", "restpasses", "joinsreaders",
    "kindsmix",  "onemore",   "deletesall", "readerovertakes", "readersfirst", "onereader", "permitstays", "cancelstays",
    "holderskept", "unlooked", "unmarked", "markerends",  "writerstoken", "fullttl",    "uncapped",
    "pushreceipt", "newestsent", "newestanswered", "srvwait", "echoalone", "inbetween",  "pushsettles", "pushallowed",
    "pushofanother", "pushrevives", "pushfirst", "tellsskipped", "tokenbefore",
    "quietskipped", "oldpush"};

struct Client {
  int8_t attempt, phase, belief, alive;
  int8_t unsure;   // whether some request of this id has no reply
  int8_t deleted;  // an operator deleted its key: its belief until it is notified is nobody's fault. 2: a request of it
                   // has been refused since, so after the reply it has no excuse
  int8_t request, executed, age, answer, token;  // the request under way; its age counts from its sending
  int8_t seconds;     // if that request asks for a rest, its length
  int8_t rest, kept;  // the rest of the time for which it wants the name kept; it has a confirmation of that
  int8_t since;       // for two mistakes: the ticks for which a push is assumed to count, whatever it says
};
struct Entry {
  int8_t id, left, echo;  // echo: ticks for which the request that set `left` still vouches; 0: a hint
};
struct Stray {  // a request whose reply nobody waits for; it is executed at any moment, or never
  int8_t request, id, tombstone, seconds, echo;
};
struct Push {  // a grant on its way; a lost one is one that does not come before it is over
  int8_t id, left, token;
  int8_t old;  // 1: a request that was sent later was refused; 2: the client has the reply too
};
struct State {
  int8_t owner, left;            // the lock: an id or a marker, and the ticks that are left of its key
  int8_t holder[kIds];           // ticks left of the lease of each id in `holders`; counts under the marker only
  int8_t rests_at_most[kIds];    // ticks that were left when an id first began its rest, counted down
  uint8_t resting;               // ids that no request names as a holder again
  uint8_t tombstones, finished, voided, deaf;  // voided: an operator ended its lease, and it has had no other since
  int8_t faults, crashes, deletes, steps, queued, strays, pushes, stepped;
  int8_t counter, newest, newest_alone;  // tokens: the last issued, the greatest believed in, and of X; ranks only
  Entry queue[kQueue];
  Stray stray[kStrays];
  Push push[kPushes];
  Client client[kClients];
};
static_assert(std::has_unique_object_representations_v<State>);

struct Violation {
  const char* what;
};

int clients, ttl, liveness, permits, looked_at, at_once, deletes_at_all;
bool full;     // the memory is full: the script's first write would be refused
bool quietly;  // the request under way says that its client has no subscription
std::vector<std::string> words;
Mistake mistake;

int client_of(int id) { return id / 2; }
char letter(int id) { return words[client_of(id)][id % 2]; }
bool joins(int id) { return std::isupper(letter(id)); }
bool rests(int id) { return letter(id) == 'H' || letter(id) == 'L'; }
char mode(int id) {  // X, R or P
  char wants = static_cast<char>(std::toupper(letter(id)));
  return wants == 'H' || wants == 'N' ? 'X' : wants == 'L' || wants == 'C' ? 'P' : wants;
}
bool confirms(int id) { return letter(id) == 'N' || letter(id) == 'C'; }
bool listens(const State& s, int id) { return !(s.deaf >> client_of(id) & 1); }
bool reached(const State& s, const Entry& e) { return listens(s, e.id) || e.echo == kQuiet; }

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

bool leave(State& s, int id) {
  int i = place(s, id);
  if (i >= 0) leave_at(s, i);
  return i >= 0;
}

int sharing(const State& s) {
  return s.owner == kShared ? static_cast<int>(kIds - std::count(s.holder, s.holder + kIds, 0)) : 0;
}

bool rested(const State& s, int id) { return s.resting >> id & 1; }

bool holds(const State& s, int id) {
  bool there = mode(id) == 'X' ? s.owner == id : s.owner == kShared && s.holder[id];
  return there && (!rested(s, id) || mistake == kRestKeepsId);
}

void no_rest(State& s, int id) {
  s.resting &= ~(1 << id);
  s.rests_at_most[id] = 0;
}

void vacate(State& s) {  // `holders` stays, and is ignored after that
  if (s.owner >= 0) no_rest(s, s.owner);
  s.owner = kNobody;
  s.left = 0;
}

void present(State& s) {  // a marker without holders is removed
  if (s.owner == kShared && !sharing(s)) vacate(s);
}

bool fits(const State& s, int id) {
  if (s.owner == kNobody) return true;
  if (s.owner >= 0) return false;
  char shared = 'R';
  for (int other = 0; other < kIds; other++)
    if (s.holder[other]) shared = mode(other);
  if (mode(id) == 'X') return mistake == kJoinsReaders && shared == 'R';
  if (mode(id) != shared) return mistake == kKindsMix;
  return shared == 'R' || sharing(s) < permits + (mistake == kOneMore);
}

int next_token(State& s) { return ++s.counter; }

void put_off(State& s, int asked) {  // rarely, because each change of the lock's key is pushed to all its holders
  if (s.left < asked && !(mistake == kMarkerEnds && s.left)) s.left = asked + (asked + 1) / 2;
}

bool promised(const State& s, int id) {  // a grant is on its way to it
  return std::any_of(s.push, s.push + s.pushes, [id](const Push& p) { return p.id == id; });
}

void grant(State& s, int id, int left) {
  for (int i = 0; i < s.queued && s.queue[i].id != id; i++)
    if (s.queue[i].left > 0 && reached(s, s.queue[i])) throw Violation{"I4: a waiter was overtaken"};
  if (mode(id) == 'X') {
    next_token(s);
    s.owner = id;
    s.left = left;
  } else {
    if (s.owner != kShared) {
      next_token(s);
      s.owner = kShared;
      s.left = 0;
      if (mistake != kHoldersKept) {
        std::fill(s.holder, s.holder + kIds, 0);
        for (int other = 0; other < kIds; other++) no_rest(s, other);
      }
    }
    s.holder[id] = left;
    put_off(s, left);
  }
  s.voided &= ~(1 << id);
  if (Client& c = s.client[client_of(id)]; left >= c.belief && !c.answer && !promised(s, id)) c.deleted = 0;
  leave(s, id);
}

void tell(State& s, int id, int left) {
  if (left <= 0 || !joins(id)) return;
  if (s.pushes == kPushes) throw Violation{"the model has too few pushes"};
  s.push[s.pushes++] = {static_cast<int8_t>(id), static_cast<int8_t>(left),
                        static_cast<int8_t>(s.counter - (mistake == kTokenBefore)), 0};
}

bool pass(State& s, int me) {  // false if a claim comes before `me`, or that is unknown
  present(s);
  int skipped = 0, given = 0;
  while (skipped < looked_at && given < at_once) {
    if (skipped == s.queued || s.queue[skipped].id == me) return true;
    Entry& head = s.queue[skipped];
    if (mistake != kNoCap) head.left = std::min<int>(head.left, liveness);
    if (head.left <= 0 && mistake != kDeadStay) {
      leave_at(s, skipped);
    } else if (!(mistake == kQuietIsSkipped ? listens(s, head.id) : reached(s, head)) && mistake != kPublishCounts) {
      if (mistake == kTellsTheSkipped) tell(s, head.id, head.echo);
      skipped++;
    } else if (!fits(s, head.id)) {
      if (mistake != kReadersFirst || mode(head.id) != 'X') return false;
      skipped++;
    } else {
      if (!reached(s, head)) throw Violation{"I12: it was handed over to the dead"};
      int left = mistake == kWholeTtl ? ttl : mistake == kWholeLiveness ? liveness : head.left;
      if (mistake == kDeadStay) left = std::max(left, 1);
      if (left > std::min<int>(head.left, liveness) && mistake != kDeadStay)
        throw Violation{"I11: a hand-over outlasts its request"};
      const Entry next = head;
      bool alone = mode(next.id) == 'X';
      if (full && mistake == kPushFirst) {
        tell(s, next.id, next.echo);
        return false;
      }
      grant(s, next.id, left);
      if (!alone) next_token(s);
      given++;
      // The last new holder sends a confirmation, which admits the next ones.
      if (alone || given < at_once) tell(s, next.id, next.echo);
      if (alone || mistake == kOneReader) return false;
    }
  }
  return mistake == kNobodyAtTheLimit;
}

int acquire(State& s, int id, int echo) {
  bool alone = mode(id) == 'X';
  if (holds(s, id)) {
    if (alone) {
      s.left = ttl;
    } else {
      s.holder[id] = ttl;
      put_off(s, ttl);
      pass(s, id);  // a hand-over to many waiters continues with the request of each of them
      next_token(s);
    }
    return 1;
  }
  if (s.tombstones >> id & 1) return -1;
  if (joins(id)) {
    int i = place(s, id);
    bool found = i >= 0;
    if (!found) {
      if (s.queued == kQueue) throw Violation{"the queue of the model is too short"};
      i = s.queued++;
      s.queue[i].id = id;
    }
    if (!found || mistake != kEchoAlone) s.queue[i].left = liveness;
    s.queue[i].echo = echo;
  }
  if (s.owner >= 0) return 0;
  bool first = (mistake == kNewcomersFirst && alone) || (mistake == kReaderOvertakes && !alone && fits(s, id));
  if (!first) first = pass(s, id);
  present(s);
  if (!first || !fits(s, id)) return 0;
  grant(s, id, ttl);
  if (!alone) next_token(s);
  return 1;
}

int renew(State& s, int id) {
  bool marked = s.owner == kShared;
  bool ours = holds(s, id);
  if (mode(id) != 'X' && mistake == kRenewsUnlooked) ours = marked;
  if (mode(id) != 'X' && mistake == kRenewsUnmarked) ours = s.holder[id];
  if (!ours) return 0;
  if (s.voided >> id & 1) throw Violation{"I6: what an operator deleted was renewed"};
  if (mode(id) == 'X') {
    s.left = ttl;
  } else {
    s.holder[id] = ttl;
    if (marked) put_off(s, ttl);
  }
  return 1;
}

void check_nobody_stands(const State& s) {
  for (int i = 0, deaf = 0; i < s.queued && deaf < looked_at; i++) {
    if (!reached(s, s.queue[i])) {
      deaf++;
    } else if (s.queue[i].left > 0) {
      if (fits(s, s.queue[i].id)) throw Violation{"I7: a release left a waiter standing"};
      return;
    }
  }
}

int release(State& s, int id, bool tombstone) {
  bool held = holds(s, id) && !rested(s, id);
  if (tombstone && mistake != kNoTombstone) s.tombstones |= 1 << id;
  bool waited = leave(s, id);
  if (held && mistake == kQueueOnly && s.client[client_of(id)].belief == 0) return 1;
  if (mistake == kPlainDelete || (held && mistake == kDeletesAll)) {
    vacate(s);
  } else if (held && mode(id) == 'X') {
    vacate(s);
  } else if (held) {
    s.holder[id] = 0;
    if (s.owner == kShared) present(s);
  }
  bool forgotten = (mistake == kFreeIsNotPassedOn && !held) || (mistake == kCancelDoesNotPass && waited) ||
                   (mistake == kPermitIsNotPassedOn && s.owner == kShared && mode(id) == 'P');
  if (s.owner < 0 && !forgotten) pass(s, -1);
  if (s.owner < 0 && at_once >= kIds) check_nobody_stands(s);
  return held;
}

int rest(State& s, int id, bool tombstone, int seconds) {
  bool alone = mode(id) == 'X';
  bool there = alone ? s.owner == id : s.owner == kShared && s.holder[id];
  if (!there || mistake == kRestPasses) return release(s, id, tombstone);
  if (tombstone) s.tombstones |= 1 << id;
  int8_t& left = alone ? s.left : s.holder[id];
  if (!rested(s, id)) {
    s.resting |= 1 << id;
    left = s.rests_at_most[id] = seconds;
  } else if (seconds < left || mistake == kRestLengthens) {
    left = seconds;
  }
  if (!alone) put_off(s, left);
  return 1;
}

int execute(State& s, int request, int id, bool tombstone, int seconds, int echo) {
  if (request == kAcquire) return acquire(s, id, echo);
  if (request == kRenew) return renew(s, id);
  if (request == kRest) return rest(s, id, tombstone, seconds);
  return release(s, id, tombstone);
}

// ---- the clients

int id_of(const State& s, int i) { return 2 * i + s.client[i].attempt; }

// Ticks for which the request under way vouches, if it is the one that sets a deadline.
int echo_of(const State& s, int i) {
  int id = id_of(s, i);
  if (quietly && joins(id)) return kQuiet;
  if (!joins(id) || (confirms(id) && mistake != kPushIsAllowed)) return 0;
  int good = mistake == kPushForATtl ? ttl : mistake == kPushUncapped ? liveness : std::min(ttl, liveness);
  return std::max(good - s.client[i].age, 0);
}

void forget_request(Client& c) { c.request = c.executed = c.age = c.answer = c.token = c.seconds = 0; }

void send(Client& c, Request request) {
  forget_request(c);
  if (mistake == kPushFromTheNewest && request == kAcquire) c.since = std::min(ttl, liveness);
  c.request = request == kRelease && c.rest ? kRest : request;
  c.seconds = c.request == kRest ? c.rest : 0;
}

void run(State& s, int i) {
  Client& c = s.client[i];
  int answer = execute(s, c.request, id_of(s, i), c.unsure, c.seconds, echo_of(s, i));
  c.answer = answer;
  c.executed = 1;
  if (c.request == kAcquire && answer == 1)
    c.token = mistake == kTokenOfTheWriter && mode(id_of(s, i)) != 'X' ? s.newest_alone : s.counter;
  if (c.request == kAcquire && answer == 0) {
    if (c.deleted) c.deleted = 2;
    for (int n = 0; n < s.pushes; n++)
      if (s.push[n].id == id_of(s, i)) s.push[n].old = std::max<int>(s.push[n].old, 1);
  }
}

void refused(State& s, int i, bool known) {  // the reply to a refused request was read, or is lost
  Client& c = s.client[i];
  if (c.deleted == 2) c.deleted = !known;
  for (int n = 0; n < s.pushes; n++)
    if (s.push[n].id == id_of(s, i) && s.push[n].old == 1) s.push[n].old = known ? 2 : 0;
}

void strand(State& s, int i) {  // nobody reads the reply; if the request was not executed yet, it may still be
  Client& c = s.client[i];
  if (c.request && !c.executed) {
    if (s.strays == kStrays) throw Violation{"the model has too few strays"};
    s.stray[s.strays++] = {c.request, static_cast<int8_t>(id_of(s, i)), c.unsure, c.seconds,
                           static_cast<int8_t>(c.request == kAcquire ? echo_of(s, i) : 0)};
  }
  refused(s, i, false);
  forget_request(c);
}

void end_attempt(State& s, int i) {
  Client& c = s.client[i];
  s.finished |= 1 << id_of(s, i);
  c.belief = c.unsure = c.deleted = c.since = 0;
  if (!c.kept) c.rest = 0;
  bool again = c.attempt + 1 < static_cast<int>(words[i].size());
  c.attempt += again;
  c.phase = again ? kIdle : kDone;
}

void leave_it(Client& c) {
  c.phase = kLeaving;
  c.belief = 0;
}

void lose(Client& c) {  // a lost lock does not rest
  leave_it(c);
  c.rest = 0;
}

void believe(State& s, int i, int valid, int token) {
  Client& c = s.client[i];
  bool alone = mode(id_of(s, i)) == 'X';
  c.phase = valid > 0 ? kHolding : kLeaving;
  c.belief = std::max(valid, 0);
  if (c.belief && rests(id_of(s, i)) && !c.rest) c.rest = kRestFor;
  if (!c.belief || c.deleted) return;
  if (token <= (alone ? s.newest : s.newest_alone)) throw Violation{"I5: a token did not grow"};
  s.newest = std::max<int>(s.newest, token);
  if (alone) s.newest_alone = std::max<int>(s.newest_alone, token);
}

void understand(State& s, int i) {
  Client& c = s.client[i];
  int request = c.request, answer = c.answer, token = c.token, valid = ttl - (mistake == kReceipt ? 0 : c.age);
  if (request == kAcquire && answer == 0) refused(s, i, true);
  if (mistake == kPushFromTheAnswered && request == kAcquire) c.since = std::max(std::min(ttl, liveness) - c.age, 0);
  forget_request(c);
  if (request == kRelease || request == kRest) {
    c.kept = request == kRest && answer == 1 && !c.deleted;
    end_attempt(s, i);
  } else if (request == kAcquire && answer < 0) {
    throw Violation{"an id that nobody cancelled has a tombstone"};
  } else if (request == kAcquire && answer == 1) {
    believe(s, i, valid, token);
  } else if (request == kAcquire && !joins(id_of(s, i))) {
    if (c.unsure)
      c.phase = kLeaving;
    else
      end_attempt(s, i);
  } else if (request == kRenew && answer == 1) {
    c.belief = std::max<int>(c.belief, valid);
  } else if (request == kRenew) {
    lose(c);
  }
}

void heed(State& s, int i, Push push) {
  Client& c = s.client[i];
  if (confirms(id_of(s, i))) throw Violation{"I13: a push is a hint to it"};
  if (push.old == 2 && mistake != kOldPush) return;
  if (mistake == kPushInBetween) {
    int unsure = c.unsure;
    strand(s, i);
    c.unsure = unsure;
  }
  if (mistake == kPushSettles) c.unsure = 0;
  int valid = push.left;
  if (mistake == kPushFromReceipt) valid = std::min(ttl, liveness);
  if (mistake == kPushFromTheNewest || mistake == kPushFromTheAnswered) valid = c.since;
  believe(s, i, valid, push.token);
}

// ---- invariants

bool fit_together(int alone, int readers, int users) {
  return alone <= 1 && users <= permits && (alone > 0) + (readers > 0) + (users > 0) <= 1;
}

void check(const State& s) {
  std::array<int, 128> believers{}, holders{};
  for (int i = 0; i < clients; i++) {
    const Client& c = s.client[i];
    if (c.belief <= 0 || c.deleted) continue;
    int id = id_of(s, i);
    believers[mode(id)]++;
    int left = mode(id) == 'X' ? s.left : std::min(s.left, s.holder[id]);
    if ((mistake == kCorrect || mistake == kMarkerEnds) && (!holds(s, id) || left < c.belief))
      throw Violation{"I2: a belief that the server does not share"};
  }
  if (!fit_together(believers['X'], believers['R'], believers['P'])) throw Violation{"I1: believers do not fit"};
  for (int id = 0; id < kIds; id++)
    if (s.owner == kShared && s.holder[id]) holders[mode(id)]++;
  if (!fit_together(0, holders['R'], holders['P'])) throw Violation{"I8: the holders at the server do not fit"};
  for (int id = 0; id < kIds; id++) {
    bool there = s.owner == id || (s.owner == kShared && s.holder[id]);
    if (there && rested(s, id) && (s.owner == id ? s.left : s.holder[id]) > s.rests_at_most[id])
      throw Violation{"I9: a rest became longer"};
    if (there && !rested(s, id) && s.finished >> id & 1) throw Violation{"I3: an id that ended holds"};
  }
  for (int i = 0; i < clients; i++) {
    int id = id_of(s, i);
    if (s.client[i].kept && s.client[i].rest && s.owner != id && !(s.owner == kShared && s.holder[id]))
      throw Violation{"I10: a rest was cut short"};
  }
  for (int i = 0; i < s.queued; i++)
    if (s.finished >> s.queue[i].id & 1) throw Violation{"I3: an id that ended waits"};
}

void tick(State& s) {
  for (int id = 0; id < kIds; id++) {
    s.rests_at_most[id] -= s.rests_at_most[id] > 0;
    if (s.holder[id] > 0 && --s.holder[id] == 0) no_rest(s, id);
  }
  if (s.left > 0 && --s.left == 0) vacate(s);
  for (int i = 0; i < s.queued; i++) {
    s.queue[i].left -= s.queue[i].left > 0;
    s.queue[i].echo -= s.queue[i].echo > 0;
  }
  for (int i = 0; i < s.strays; i++) s.stray[i].echo -= s.stray[i].echo > 0;
  for (int i = 0; i < s.pushes; i++) s.push[i].left -= s.push[i].left > 0;
  for (int i = 0; i < clients; i++) s.client[i].since -= s.client[i].since > 0;
  for (int i = 0; i < clients; i++)
    if (s.client[i].rest > 0 && --s.client[i].rest == 0) s.client[i].kept = 0;
}

void check_progress(State s) {
  int waiting = 0, served = 0, bound = ttl + liveness + clients + 1 + kStepBack * s.stepped;
  for (int i = 0; i < clients; i++) {
    Client& c = s.client[i];
    c.unsure |= c.request != kNone;
    forget_request(c);
    for (size_t n = 0; n < words[i].size(); n++) bound += rests(2 * i + n) ? kRestFor : 0;
    if (!c.alive) continue;
    s.deaf &= ~(1 << i);
    waiting += c.phase == kWaiting && joins(id_of(s, i));
  }
  for (int t = 0; t <= bound; t++) {
    for (int i = 0; i < clients; i++) {
      Client& c = s.client[i];
      int id = id_of(s, i);
      if (!c.alive) continue;
      if (c.phase == kHolding || c.phase == kLeaving) {
        execute(s, c.rest ? kRest : kRelease, id, c.unsure, c.rest, 0);
        c.phase = kDone;
        c.belief = c.rest = 0;
      } else if (c.phase == kWaiting && joins(id) && acquire(s, id, 0) == 1) {
        c.phase = kHolding;
        if (rests(id)) c.rest = kRestFor;
        served++;
      }
    }
    if (served == waiting) return;
    tick(s);
    s.counter = s.newest = s.newest_alone = s.pushes = 0;
  }
  throw Violation{"P: a waiter was not served in time"};
}

// ---- the search

class Seen {  // fingerprints, in a table that is never more than two thirds full
 public:
  bool insert(uint64_t print) {
    if (3 * ++size_ > 2 * slots_.size()) grow();
    size_t at = find(print);
    if (slots_[at]) return size_--, false;
    slots_[at] = print;
    return true;
  }
  size_t size() const { return size_; }

 private:
  size_t find(uint64_t print) const {
    size_t at = print & (slots_.size() - 1);
    while (slots_[at] && slots_[at] != print) at = (at + 1) & (slots_.size() - 1);
    return at;
  }
  void grow() {
    std::vector<uint64_t> old(2 * slots_.size());
    old.swap(slots_);
    for (uint64_t print : old)
      if (print) slots_[find(print)] = print;
  }
  std::vector<uint64_t> slots_ = std::vector<uint64_t>(1 << 20);
  size_t size_ = 0;
};

uint64_t fingerprint(const State& s) {
  constexpr size_t kWords = (sizeof(State) + 7) / 8;
  uint64_t words[kWords] = {}, hash = 0;
  std::memcpy(words, &s, sizeof s);
  for (uint64_t word : words) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
    hash *= 0xD6E8FEB86659FD93u;
    hash ^= hash >> 29;
  }
  return hash | !hash;
}

Seen seen;
std::deque<State> open;
uint64_t steps_taken;

void rank_tokens(State& s) {  // only the order of tokens matters
  std::array<int8_t*, 3 + kClients + kPushes> all{&s.counter, &s.newest, &s.newest_alone};
  for (int i = 0; i < kClients; i++) all[3 + i] = &s.client[i].token;
  for (int i = 0; i < kPushes; i++) all[3 + kClients + i] = &s.push[i].token;
  std::array<int8_t, all.size() + 1> values{};
  for (size_t i = 0; i < all.size(); i++) values[i] = *all[i];
  std::sort(values.begin(), values.end());
  auto end = std::unique(values.begin(), values.end());
  for (int8_t* each : all) *each = static_cast<int8_t>(std::lower_bound(values.begin(), end, *each) - values.begin());
}

void tidy(State& s) {  // make states equal that differ only in values that no later step reads
  present(s);
  uint8_t asked = 0;  // ids of which a request may still be executed
  uint8_t heed = 0;   // ids of which a push may still count
  for (int i = 0; i < s.strays; i++) asked |= 1 << s.stray[i].id;
  for (int i = 0; i < clients; i++) {
    Client& c = s.client[i];
    if (!c.alive) {
      if (c.executed) forget_request(c);
      if (!c.belief) c.phase = kDone, c.deleted = 0;
      if (!c.request) c.unsure = 0;
      if (!c.kept) c.rest = 0;
      if (!c.request && place(s, id_of(s, i)) < 0) s.deaf &= ~(1 << i);
    } else if (c.phase == kIdle || c.phase == kDone) {
      s.deaf &= ~(1 << i);
    }
    int id = id_of(s, i);
    bool waits = c.alive && (c.phase == kWaiting || (c.phase == kLeaving && mistake == kPushRevives));
    if (waits) heed |= 1 << id;
    if (c.alive && mistake == kPushOfAnother) heed |= 3 << 2 * i;
    if (!waits) c.since = 0;
    if (!c.belief && !c.request && !(waits && promised(s, id))) c.deleted = 0;
    if (c.request == kRelease) c.age = c.answer = 0;
    if (c.request == kRest) c.age = 0;
    if (c.executed && c.answer != 1 && mistake != kPushFromTheAnswered) c.age = 0;
    if ((c.alive && c.phase != kDone) || c.request) asked |= 1 << id_of(s, i);
  }
  for (int id = 0; id < kIds; id++)
    if (s.owner == kShared ? !s.holder[id] : s.owner != id) no_rest(s, id);
  if (s.owner != kShared && !deletes_at_all) std::fill(s.holder, s.holder + kIds, 0);
  s.tombstones &= asked;
  s.voided &= asked;
  int kept = 0;
  for (int i = 0; i < s.strays; i++) {
    Stray t = s.stray[i];
    bool over = !holds(s, t.id) && ((t.request == kAcquire && s.tombstones >> t.id & 1) ||
                                    (t.request == kRenew && s.finished >> t.id & 1 && mistake != kRenewsUnlooked));
    if (!over) s.stray[kept++] = t;
  }
  std::fill(s.stray + kept, s.stray + kStrays, Stray{});
  s.strays = kept;
  for (int i = 0; i < s.strays; i++)
    if (!(heed >> s.stray[i].id & 1) && s.stray[i].echo != kQuiet) s.stray[i].echo = 0;
  for (int i = 0; i < s.queued; i++)
    if (!(heed >> s.queue[i].id & 1) && s.queue[i].echo != kQuiet) s.queue[i].echo = 0;
  bool timed = mistake != kPushFromReceipt && mistake != kPushFromTheNewest && mistake != kPushFromTheAnswered;
  auto is_over = [&](const Push& p) { return (!p.left && timed) || !(heed >> p.id & 1); };
  s.pushes = static_cast<int8_t>(std::remove_if(s.push, s.push + s.pushes, is_over) - s.push);
  std::fill(s.push + s.pushes, s.push + kPushes, Push{});
  rank_tokens(s);
}

void sort(State& s) {  // sort the values whose order does not matter
  std::sort(s.stray, s.stray + s.strays, [](const Stray& a, const Stray& b) {
    return std::array{a.request, a.id, a.tombstone, a.seconds, a.echo} <
           std::array{b.request, b.id, b.tombstone, b.seconds, b.echo};
  });
  std::sort(s.push, s.push + s.pushes, [](const Push& a, const Push& b) {
    return std::array{a.id, a.left, a.token, a.old} < std::array{b.id, b.left, b.token, b.old};
  });
}

State renamed(const State& s, const std::array<int, kClients>& to) {
  State r = s;
  auto name = [&](int id) { return static_cast<int8_t>(id < 0 ? id : 2 * to[id / 2] + id % 2); };
  r.tombstones = r.finished = r.deaf = r.resting = r.voided = 0;
  for (int i = 0; i < clients; i++) {
    r.client[to[i]] = s.client[i];
    r.tombstones |= (s.tombstones >> 2 * i & 3) << 2 * to[i];
    r.finished |= (s.finished >> 2 * i & 3) << 2 * to[i];
    r.resting |= (s.resting >> 2 * i & 3) << 2 * to[i];
    r.voided |= (s.voided >> 2 * i & 3) << 2 * to[i];
    r.deaf |= (s.deaf >> i & 1) << to[i];
    for (int n = 0; n < 2; n++) {
      r.holder[2 * to[i] + n] = s.holder[2 * i + n];
      r.rests_at_most[2 * to[i] + n] = s.rests_at_most[2 * i + n];
    }
  }
  r.owner = name(s.owner);
  for (int i = 0; i < s.queued; i++) r.queue[i].id = name(s.queue[i].id);
  for (int i = 0; i < s.strays; i++) r.stray[i].id = name(s.stray[i].id);
  for (int i = 0; i < s.pushes; i++) r.push[i].id = name(s.push[i].id);
  return r;
}

std::vector<std::array<int, kClients>> alike;  // how clients of one kind can change places

State least_of_its_likes(const State& s) {
  State least = s;
  sort(least);
  for (const auto& to : alike) {
    State other = renamed(s, to);
    sort(other);
    if (std::memcmp(&other, &least, sizeof least) < 0) least = other;
  }
  return least;
}

void reach(State s) {
  steps_taken++;
  tidy(s);
  s = least_of_its_likes(s);
  uint64_t print = fingerprint(s);
  if (!seen.insert(print)) return;
  check(s);
  if (print % 50 == 0) check_progress(s);
  open.push_back(s);
}

void time_passes(State s) {
  tick(s);
  for (int i = 0; i < clients; i++) {
    Client& c = s.client[i];
    if (c.request) c.age = std::min(c.age + 1, std::max(ttl, mistake == kPushUncapped ? liveness : 0));
    if (c.belief > 0 && --c.belief == 0 && c.phase == kHolding) {
      c.unsure |= c.request != kNone;
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
  if (c.request && !c.executed) {
    next([&] { run(s, i); });
    if (from.faults) next([&] {  // executed, and once more at another time
      s.faults--;
      Client before = c;
      strand(s, i);
      c = before;
      run(s, i);
      c.unsure = 1;
    });
  }
  const Client was = from.client[i];
  if (mistake == kPushFirst && was.request == kAcquire && !was.executed && from.faults) next([&] {
    s.faults--;
    full = true;
    run(s, i);
    full = false;
  });
  if (!was.alive) return;
  if (was.phase == kIdle) next([&] {
    c.phase = kWaiting;
    send(c, kAcquire);
  });
  bool renews = was.phase != kHolding || !confirms(id_of(from, i));
  if (!was.request && was.phase >= kWaiting && was.phase <= kLeaving && renews)
    next([&] { send(c, was.phase == kWaiting ? kAcquire : was.phase == kHolding ? kRenew : kRelease); });
  bool heeds = was.phase == kWaiting && (!was.request || mistake == kPushInBetween);
  for (int n = 0; n < from.pushes && (heeds || (was.phase == kLeaving && mistake == kPushRevives)); n++) {
    Push push = from.push[n];
    bool ours = push.id == id_of(from, i) || (mistake == kPushOfAnother && client_of(push.id) == i);
    if (ours) next([&] { heed(s, i, push); });
  }
  if (!was.request && (was.phase == kWaiting || was.phase == kHolding)) next([&] { leave_it(c); });
  if (was.executed) next([&] { understand(s, i); });
  if (was.request && from.faults) next([&] {  // no reply in time
    s.faults--;
    strand(s, i);
    c.unsure = 1;
  });
  if (was.deleted && was.phase == kHolding) next([&] {  // it is notified of the loss, or notices it by its renewal
    c.unsure |= c.request != kNone;
    strand(s, i);
    lose(c);
  });
  for (int half_open = 0; half_open < 2 && from.crashes; half_open++) next([&] {
    s.crashes--;
    if (!half_open) s.deaf |= 1 << i;
    strand(s, i);
    c.alive = 0;
  });
  if (from.deaf >> i & 1) {
    quietly = true;
    if (was.request == kAcquire && !was.executed) next([&] { run(s, i); });
    if (was.request == kAcquire && from.faults) next([&] {  // no reply in time
      s.faults--;
      strand(s, i);
      c.unsure = 1;
    });
    quietly = false;
    next([&] { s.deaf &= ~(1 << i); });
  }
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
    execute(s, t.request, t.id, t.tombstone, t.seconds, t.echo);
    reach(s);
  }
  for (int force = 0; force < 2 && from.deletes && from.owner != kNobody; force++) {
    State s = from;
    s.deletes--;
    for (int id = 0; id < kIds; id++) {
      if (s.owner != id && !(s.owner == kShared && s.holder[id])) continue;
      Client& c = s.client[client_of(id)];
      s.voided |= 1 << id;
      c.deleted = c.deleted || (id == id_of(s, client_of(id)) && (c.belief > 0 || c.request || promised(s, id)));
      if (c.kept && id == id_of(s, client_of(id))) c.kept = c.rest = 0;
    }
    if (force && s.owner == kShared) std::fill(s.holder, s.holder + kIds, 0);
    vacate(s);
    if (force) pass(s, -1);
    reach(s);
  }
  if (from.steps) {
    State s = from;
    s.steps--;
    s.stepped = 1;
    if (s.owner != kNobody) s.left += kStepBack;
    for (int id = 0; id < kIds; id++) {
      if (s.holder[id]) s.holder[id] += kStepBack;
      if (rested(s, id)) s.rests_at_most[id] += kStepBack;
    }
    for (int i = 0; i < s.queued; i++)
      if (s.queue[i].left > 0) s.queue[i].left += kStepBack;
    reach(s);
  }
}

int main(int count, char** given) {
  if (count != 12) return std::fputs("see the head of redis.cpp\n", stderr), 2;
  std::string word;
  for (const char* at = given[1];; at++) {
    if (*at && *at != ',') {
      word += *at;
      continue;
    }
    words.push_back(word);
    word.clear();
    if (!*at) break;
  }
  clients = static_cast<int>(words.size());
  auto number = [&](int i) { return std::atoi(given[i]); };
  ttl = number(6), liveness = number(7), permits = number(8), looked_at = number(9);
  at_once = number(10) ? number(10) : kIds;
  auto known = std::find(std::begin(kMistakes), std::end(kMistakes), std::string_view(given[11]));
  if (known == std::end(kMistakes) || clients > kClients) return std::fputs("no such mistake or size\n", stderr), 2;
  for (const std::string& each : words)
    if (each.empty() || each.size() > 2 || (each.size() == 2 && (each[0] == 'H' || each[0] == 'L')))
      return std::fputs("one or two attempts each, and H or L is the last one\n", stderr), 2;
  mistake = static_cast<Mistake>(known - std::begin(kMistakes));
  std::array<int, kClients> to{0, 1, 2, 3};
  while (std::next_permutation(to.begin(), to.begin() + clients)) {
    bool same = true;
    for (int i = 0; i < clients; i++) same &= words[i] == words[to[i]];
    if (same) alike.push_back(to);
  }

  State first{};
  first.owner = kNobody;
  first.faults = number(2), first.crashes = number(3), first.deletes = number(4), first.steps = number(5);
  deletes_at_all = first.deletes;
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
  for (int i = 1; i < count; i++) arguments += std::string(given[i]) + " ";
  std::printf("%-36s %9zu states %10llu steps: %s\n", arguments.c_str(), seen.size(),
              static_cast<unsigned long long>(steps_taken), found.c_str());
  return found != "exhausted";
}
