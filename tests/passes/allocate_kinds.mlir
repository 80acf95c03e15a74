// RUN: secc opt %s -p 'allocate{cluster="1x8xH100+1x8xA800" global-batch=64},place' | filecheck %s
// RUN: secc opt %s -p 'allocate{cluster="1x8xH100+1x8xA800" global-batch=64 strategy=colocate}' | filecheck %s --check-prefix=ALL
// RUN: secc opt %s -p 'allocate{cluster="1x8xH100+1x8xA800" global-batch=64 objective=gpus step-time=1.0},place' | filecheck %s --check-prefix=FEW

// The student is on the faster devices and its teacher on the slower ones, each with the times of its own kind. Sharing all ranks, both
// count with the slower. Where little time is asked for, one kind suffices and the plan's cluster is that alone.

// CHECK: world_size = 16 : i64
// ALL: world_size = 16 : i64
// FEW: cluster = {{.*}}nodes{{[^ ]*}} 1,
// FEW-SAME: reasons

sec.graph "distil" {
  sec.symbol "B" kind "rows" key "input_ids" dim 0
  sec.symbol "S" kind "width" key "input_ids" dim 1
  sec.pattern when [] share "1" {B = 1, S = 4096}
  sec.block "teacher" class "Teacher" params 1000000000 trainable 0 component "teacher"
  sec.block "student" class "Student" params 800000000 trainable 800000000 component "student"
  // CHECK: sec.section "teacher"
  // CHECK-SAME: ranks = [8 : i64, 9 : i64, 10 : i64, 11 : i64, 12 : i64, 13 : i64, 14 : i64, 15 : i64]
  // CHECK-SAME: forward_ns = "{{.*}}110000 + 1000*(2000000000*B*S)//218400000
  // ALL: sec.section "teacher"
  // ALL-SAME: forward_ns = "{{.*}}110000 + 1000*(2000000000*B*S)//218400000
  sec.section "teacher" mode "forward" when [] blocks ["teacher"]
  // CHECK: sec.section "student"
  // CHECK-SAME: ranks = [0 : i64, 1 : i64, 2 : i64, 3 : i64, 4 : i64, 5 : i64, 6 : i64, 7 : i64]
  // CHECK-SAME: forward_ns = "{{.*}}115000 + 1000*(1600000000*B*S)//593400000
  // ALL: sec.section "student"
  // ALL-SAME: forward_ns = "{{.*}}115000 + 1000*(1600000000*B*S)//218400000
  sec.section "student" mode "train" when [] blocks ["student"]
  sec.case "text" when [] {
    %ids = sec.input "input_ids" : !sec.tensor<[B, S], i64>
    %t = sec.call "teacher" (%ids) args "$0" outs [""] in @teacher : !sec.tensor<[B, S, 64], bf16>
    %h = sec.call "student" (%ids, %t) args "$0, $1" outs [""] in @student : !sec.tensor<[B, S, 64], bf16, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @student : !sec.tensor<[], bf16, grad>
    sec.term "loss" (%l) in @student
    sec.return constant "0.0"
  }
}
