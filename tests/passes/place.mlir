// RUN: secc opt %s -p 'allocate{cluster="2x4xH100" global-batch=64 strategy=apart set="teacher.dp=4","student.dp=4"},place' | filecheck %s
// RUN: secc opt %s -p 'allocate{cluster="2x4xH100" global-batch=64 strategy=apart set="teacher.dp=2","teacher.pp=1","student.dp=3","student.pp=2","student.tp=1"},place' | filecheck %s --check-prefix PP
// RUN: secc opt %s -p 'allocate{cluster="1x8xH100" global-batch=64 strategy=apart set="teacher.dp=4","student.dp=4"},place' | filecheck %s --check-prefix ONE

// Hidden states of a teacher go to any rank of the student: with half of each on a node, half of the bytes stay there. The gradients of the
// student would then be summed over both nodes, which is worth it only where they are small beside the hidden states.

// CHECK: placement
// CHECK-SAME: bytes_between_nodes
// PP: placement
// ONE-NOT: placement

sec.graph "distil" {
  sec.symbol "B" kind "rows" key "input_ids" dim 0
  sec.symbol "S" kind "width" key "input_ids" dim 1
  sec.pattern when [] share "1" {B = 1, S = 4096}
  sec.block "teacher" class "Teacher" params 300000000 trainable 0 component "teacher" layers 8
  sec.block "student" class "Student" params 100000000 trainable 1000000 component "student" layers 8
  // CHECK: sec.section "teacher"
  // CHECK-SAME: ranks = [0 : i64, 1 : i64, 4 : i64, 5 : i64]
  // PP: sec.section "teacher"
  // PP-SAME: ranks = [0 : i64, 4 : i64]
  // ONE: sec.section "teacher"
  // ONE-SAME: ranks = [0 : i64, 1 : i64, 2 : i64, 3 : i64]
  sec.section "teacher" mode "forward" when [] blocks ["teacher"]
  // CHECK: sec.section "student"
  // CHECK-SAME: ranks = [2 : i64, 3 : i64, 6 : i64, 7 : i64]
  // PP: sec.section "student"
  // PP-SAME: ranks = [1 : i64, 2 : i64, 3 : i64, 5 : i64, 6 : i64, 7 : i64]
  sec.section "student" mode "train" when [] blocks ["student"]
  sec.case "text" when [] {
    %ids = sec.input "input_ids" : !sec.tensor<[B, S], i64>
    %t = sec.call "teacher" (%ids) args "$0" outs [""] in @teacher : !sec.tensor<[B, S, 8192], bf16>
    %h = sec.call "student" (%ids, %t) args "$0, $1" outs [""] in @student : !sec.tensor<[B, S, 64], bf16, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @student : !sec.tensor<[], bf16, grad>
    sec.term "loss" (%l) in @student
    sec.return constant "0.0"
  }
}
