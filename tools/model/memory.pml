/* Memory as its readers see it. The payload of launch n is n; its place tells the sender. */
byte data[W * W * SLOTS * UNITS];
byte flag[W * W * SLOTS];
/* Stores on their way, 0 if there is none. `owed`: a flag that was released must not overtake it. */
byte data_sent[W * W * SLOTS * UNITS];
byte flag_sent[W * W * SLOTS];
bit owed[W * W * SLOTS * UNITS];
#ifdef TAGGED
byte tag[W * W * SLOTS * UNITS];
byte tag_sent[W * W * SLOTS * UNITS];
#endif
byte finished[W]; /* launches */

/* Delivers what `writer` stores into the slab of `home`: anything at any time, in any order, except
 * that a released flag waits for the stores before it in its slot. (A real release orders more.) */
#define DELIVER_FLAG(s) \
  :: d_step { \
       flag_sent[FLAG(home, writer, s)] != 0 \
       && !owed[CELL(HOME(home, writer), writer, s, 0)] \
       && !owed[CELL(HOME(home, writer), writer, s, 1)] -> \
       flag[FLAG(home, writer, s)] = flag_sent[FLAG(home, writer, s)]; \
       flag_sent[FLAG(home, writer, s)] = 0 }
#if defined(TAGGED) && !defined(SPLIT)
#define WITH_TAG(c) tag[c] = tag_sent[c]; tag_sent[c] = 0;
#else
#define WITH_TAG(c)
#endif
#define ARRIVE(c) data[c] = data_sent[c]; data_sent[c] = 0; owed[c] = 0; WITH_TAG(c)
#define DELIVER_DATA_IF(sane, c) :: d_step { sane && data_sent[c] != 0 -> ARRIVE(c) }
#ifdef SPLIT
#define DELIVER_TAG_IF(sane, c) \
  :: d_step { sane && tag_sent[c] != 0 -> tag[c] = tag_sent[c]; tag_sent[c] = 0 }
#else
#define DELIVER_TAG_IF(sane, c)
#endif
#define DELIVER_SLOT(s) \
  DELIVER_FLAG(s) \
  DELIVER_DATA_IF(true, CELL(home, writer, s, 0)) \
  DELIVER_DATA_IF(true, CELL(home, writer, s, 1)) \
  DELIVER_TAG_IF(true, CELL(home, writer, s, 0)) \
  DELIVER_TAG_IF(true, CELL(home, writer, s, 1))

#ifndef LAZY
proctype link(byte writer; byte home)
{
end:
  do
  DELIVER_SLOT(0)
#if SLOTS > 1
  DELIVER_SLOT(1)
#endif
  od
}
#endif

/* LAZY: no links; who looks at a place decides first whether a store on its way has arrived. The same
 * memory with far fewer states, since nobody sees when a store arrives before somebody looks. */
#ifdef LAZY
#define PENDING_FLAG(home, writer) SAME(flag_sent[FLAG(home, writer, s)], FLAG_OF(epoch))
#define OR_FLAG_ARRIVES(home, writer) \
  :: d_step { writer < W && PENDING_FLAG(home, writer) -> \
       for (u : 0 .. UNITS - 1) { \
         if \
         :: owed[CELL(HOME(home, writer), writer, s, u)] -> \
            ARRIVE(CELL(HOME(home, writer), writer, s, u)) \
         :: else \
         fi \
       } \
       u = 0; \
       flag[FLAG(home, writer, s)] = flag_sent[FLAG(home, writer, s)]; \
       flag_sent[FLAG(home, writer, s)] = 0 }
#define OR_DATA_ARRIVE(c) \
  DELIVER_DATA_IF(p < W, c) \
  DELIVER_TAG_IF(p < W, c)
#else
#define OR_FLAG_ARRIVES(home, writer)
#define OR_DATA_ARRIVE(c)
#endif
