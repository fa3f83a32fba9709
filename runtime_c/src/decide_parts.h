/* decide_parts.h: what the policies share. For decide.c and policy_*.c alone. */
#ifndef PDS_DECIDE_PARTS_H
#define PDS_DECIDE_PARTS_H

#include <stdbool.h>

#include "decide.h"

int64_t pds_time(int64_t ns); /* clamped to 0 .. PDS_TIME_MAX */
int64_t pds_due_cpu(const pds_decision_in *in, const pds_due *due);
int64_t pds_due_gpu(const pds_decision_in *in, const pds_due *due);
int64_t pds_one_gpu(const pds_decision_in *in, const pds_due *due); /* a submission of one */
int64_t pds_io_expert(const pds_decision_in *in);                   /* at least 1 */

uint32_t pds_room_on(const pds_decision_in *in);                 /* loads that the slots allow */
uint32_t pds_room_pre(const pds_decision_in *in, uint32_t n_on); /* and prefetches behind them */

/* The hottest n, hottest first. */
void pds_take_on(const pds_decision_in *in, uint32_t n, pds_decision *out);
void pds_take_pre(const pds_decision_in *in, uint32_t n, pds_decision *out);

void pds_decide_adaptsched(const pds_decision_in *in, pds_decision *out);
void pds_decide_paper(const pds_decision_in *in, pds_decision *out);
void pds_decide_static(const pds_decision_in *in, pds_decision *out);
void pds_decide_ondemand(const pds_decision_in *in, pds_decision *out);
void pds_decide_fate(const pds_decision_in *in, pds_decision *out);
void pds_decide_fiddler(const pds_decision_in *in, pds_decision *out);
void pds_decide_hybrimoe(const pds_decision_in *in, pds_decision *out);
void pds_decide_apex(const pds_decision_in *in, pds_decision *out);

#endif
