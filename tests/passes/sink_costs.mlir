// RUN: secc opt %s -p 'sink-boundaries{cluster="2x8xH100"}' | filecheck %s
// RUN: secc opt %s -p 'sink-boundaries{cluster="1x2xcpu"}' | filecheck %s --check-prefix=SLOW
// RUN: secc opt %s -p 'sink-boundaries{cluster="2x8xL40S"}' | filecheck %s --check-prefix=SMALL

// The teacher needs its head's logits, too, for a block that is too large to move. On large GPUs the head is computed in both sections, which is
// cheaper than sending its logits; on CPUs, whose links are fast beside them, and where its weights have no room, the logits travel.

sec.graph "distil" widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.pattern when [] share "1" {B = 1, S = 100}
  sec.block "teacher.body" class "T" params 5000 trainable 0 component "teacher" layers 4 when []
  sec.block "teacher.head" class "H" params 2000000000 trainable 0 component "teacher" layers 4 when []
  sec.block "teacher.judge" class "J" params 9000000000 trainable 0 component "teacher" layers 4 when []
  sec.block "student" class "S" params 9000 trainable 9000 component "student" layers 2 when []
  // CHECK: sec.section "teacher" mode "forward" when [] blocks ["teacher.body", "teacher.head", "teacher.judge"]
  // CHECK-NEXT: sec.section "student" mode "train" when [] blocks ["student", "teacher.head"]
  // CHECK-SAME: notes = ["teacher.head computed in both: 64.4 kB -> 3.6 kB per sample from teacher to student, with 1 MFLOP a sample and 8 GB of weights; a sample's messages take 0.00129 -> 7.2e-05 ms at 50 GB/s"]
  // SLOW: sec.section "student" mode "train" when [] blocks ["student"]
  // SMALL: sec.section "student" mode "train" when [] blocks ["student"]
  sec.section "teacher" mode "forward" when [] blocks ["teacher.body", "teacher.head", "teacher.judge"]
  sec.section "student" mode "train" when [] blocks ["student"]
  sec.case "text" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %h = sec.call "teacher.body" (%ids) args "$0" outs [""] no_grad in @teacher {mode = "forward", flops = "1000000*B*S"} : !sec.tensor<[B, S, 8], f32>
    %t = sec.call "teacher.head" (%h) args "$0" outs [""] no_grad in @teacher {mode = "forward", flops = "10000*B*S"} : !sec.tensor<[B, S, 160], f32>
    %j = sec.call "teacher.judge" (%t) args "$0" outs [""] no_grad in @teacher {mode = "forward", flops = "90000*B*S"} : !sec.tensor<[B, S, 1], f32>
    %s = sec.call "student" (%ids) args "$0" outs [""] in @student {mode = "train", flops = "20000*B*S"} : !sec.tensor<[B, S, 160], f32, grad>
    %d = sec.glue "aten.sub.Tensor" (%t, %s) args "$0, $1" in @student : !sec.tensor<[B, S, 160], f32, grad>
    %k = sec.glue "aten.mul.Tensor" (%d, %j) args "$0, $1" in @student : !sec.tensor<[B, S, 160], f32, grad>
    %n = sec.glue "aten.sum.default" (%k) args "$0" in @student : !sec.tensor<[], f32, grad>
    sec.term "loss" (%n) in @student
    sec.return constant "0.0"
  }
}
