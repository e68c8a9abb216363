/* The channel protocol under a weak memory, for SPIN. What it shows and leaves out: docs/protocol.md.
 *
 * Parameters, all -D: W ranks, N launches, one of PULL, PUSH, TAGGED.
 *   FIRST    epoch of the first launch; MOD: epochs are below it, as 2^32 is the limit in layout.py
 *   GIVE_UP  a wait may time out at any moment
 *   IDLE=k   unit 1 is part of every k-th launch only, from the first on
 * One fault each, for the negative controls:
 *   SLOTS=1, ONE_DATA_SLOT, NO_RELEASE, NO_ACQUIRE, FLAG_FIRST, AT_LEAST, SPLIT, NO_WAIT,
 *   WRAP_TO=0 or 1; with FAULTY, or a store that overtakes its own predecessor is what is found
 */
#ifndef MOD
#define MOD 6 /* the smallest for which a slot sees two epochs in turn after the wrap: 2, 4, 2, 4 */
#endif
#ifndef FIRST
#define FIRST 4
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef WRAP_TO
#define WRAP_TO 2
#endif
#ifndef IDLE
#define IDLE 1
#endif
#define UNITS 2 /* of one message: two, so that a torn one can be seen */

#define NEXT(e) ((e) + 1 == MOD -> WRAP_TO : (e) + 1)
#define USED(n, u) ((u) == 0 || ((n) - 1) % IDLE == 0)
#define FLAG_OF(e) ((e) + 1) /* the signature: the flag of no epoch is the 0 of fresh memory */
#ifdef AT_LEAST
#define SAME(seen, wanted) ((seen) >= (wanted))
#elif defined(NO_WAIT)
#define SAME(seen, wanted) true
#else
#define SAME(seen, wanted) ((seen) == (wanted))
#endif
#ifdef NO_WAIT /* values are wrong, of course: let the other properties speak */
#define RIGHT(value) true
#else
#define RIGHT(value) (value == n)
#endif
#ifdef PULL
#define HOME(reader, writer) (writer)
#else
#define HOME(reader, writer) (reader)
#endif
#ifdef ONE_DATA_SLOT
#define PLACE(s) 0
#else
#define PLACE(s) (s)
#endif
#define CELL(home, writer, s, u) ((((home) * W + (writer)) * SLOTS + PLACE(s)) * UNITS + (u))
#define FLAG(home, writer, s) (((home) * W + (writer)) * SLOTS + (s))
#ifdef FAULTY
#define ONE_AT_A_TIME(pending) skip
#else
#define ONE_AT_A_TIME(pending) assert((pending) == 0)
#endif

#include "memory.pml"

/* To issue a store is invisible until it is delivered, so a launch issues all of them in one step. */
inline store(c)
{
  ONE_AT_A_TIME(data_sent[c]);
  data_sent[c] = n;
  owed[c] = 0;
#ifdef TAGGED
  tag_sent[c] = epoch;
#endif
}

inline stage()
{
  for (u : 0 .. UNITS - 1) {
    if
    :: !USED(n, u)
    :: else ->
#ifdef PULL
       store(CELL(me, me, s, u));
#else
       for (p : 0 .. W - 1) {
         if
         :: p == me
         :: else -> store(CELL(p, me, s, u))
         fi
       }
#endif
    fi
  }
}

inline signal()
{
  for (p : 0 .. W - 1) {
    if
    :: p == me
    :: else ->
#if !defined(TAGGED) && !defined(NO_RELEASE)
       for (u : 0 .. UNITS - 1) {
         owed[CELL(HOME(p, me), me, s, u)] = (data_sent[CELL(HOME(p, me), me, s, u)] != 0)
       }
#endif
       ONE_AT_A_TIME(flag_sent[FLAG(p, me, s)]);
       flag_sent[FLAG(p, me, s)] = FLAG_OF(epoch)
    fi
  }
}

/* The lemma of docs/protocol.md: whoever starts launch n, all have finished n - 2. */
inline start()
{
  epoch = NEXT(epoch);
  s = epoch % SLOTS;
  for (p : 0 .. W - 1) {
    assert(poisoned || finished[p] + 2 >= n)
  }
}

#ifdef GIVE_UP
#define OR_GIVE_UP :: poisoned = 1; break
#else
#define OR_GIVE_UP
#endif

/* Side by side in the kernels; one after the other here, since a wait changes nothing. Meanwhile
 * one load may run ahead of the acquire; one is enough, since each value is judged by itself. */
inline await_flags()
{
  p = (me == 0 -> 1 : 0);
  do
  :: p < W && SAME(flag[FLAG(me, p, s)], FLAG_OF(epoch)) ->
     d_step {
#ifndef NO_ACQUIRE
       if
       :: early_peer == p -> early = 0; early_peer = 0; early_unit = 0
       :: else
       fi;
#endif
       p = (p + 1 == me -> p + 2 : p + 1)
     }
  OR_FLAG_ARRIVES(me, p)
  :: p >= W -> break
#ifndef TAGGED
  :: d_step { p < W && early == 0 ->
       early = data[CELL(HOME(me, p), p, s, 0)] + 1; early_peer = p }
  :: d_step { p < W && early == 0 ->
       early = data[CELL(HOME(me, p), p, s, 1)] + 1; early_peer = p; early_unit = 1 }
#endif
  OR_GIVE_UP
  od;
  p = 0
}

/* Tagged units are polled until their tag is the epoch; others are read once. */
#ifdef TAGGED
#define COMPLETE(c) SAME(tag[c], epoch)
#else
#define COMPLETE(c) true
#endif
inline collect()
{
  p = (me == 0 -> 1 : 0);
  u = 0;
  do
  :: p >= W -> break
  OR_DATA_ARRIVE(CELL(HOME(me, p), p, s, u))
  :: d_step { p < W && (!USED(n, u) || COMPLETE(CELL(HOME(me, p), p, s, u))) ->
       value = data[CELL(HOME(me, p), p, s, u)];
       if
       :: early != 0 && early_peer == p && early_unit == u -> value = early - 1
       :: else
       fi;
       assert(!USED(n, u) || RIGHT(value));
       value = 0;
       u++;
       if
       :: u == UNITS -> u = 0; p = (p + 1 == me -> p + 2 : p + 1)
       :: else
       fi }
#ifdef TAGGED
  OR_GIVE_UP
#endif
  od;
  p = 0; u = 0; early = 0; early_peer = 0; early_unit = 0
}

proctype rank(byte me)
{
  byte n = 1, epoch = FIRST - 1, s, p, u, early, early_peer, early_unit, value;
  bit poisoned;
  do
  :: n > N -> break
  :: else ->
     atomic {
       start();
       if
       :: poisoned
       :: else ->
#ifdef FLAG_FIRST
          signal(); stage()
#else
          stage(); signal()
#endif
       fi;
       p = 0; u = 0
     }
     if
     :: poisoned
     :: else ->
#ifdef TAGGED
        collect();
        if
        :: poisoned
        :: else -> await_flags()
        fi
#else
        await_flags();
        if
        :: poisoned
        :: else -> collect()
        fi
#endif
     fi;
     d_step { finished[me] = n; n++; p = 0; u = 0; early = 0; early_peer = 0; early_unit = 0 }
  od
}

init
{
  byte i, j;
  atomic {
#ifndef LAZY
    for (i : 0 .. W - 1) {
      for (j : 0 .. W - 1) {
        if
        :: i != j || HOME(0, 1) == 1 -> run link(i, j)
        :: else
        fi
      }
    }
#endif
    for (i : 0 .. W - 1) {
      run rank(i)
    }
    i = 0; j = 0
  }
}
