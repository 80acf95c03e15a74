// RUN: secc opt %s -p sink-boundaries | filecheck %s
// RUN: secc opt %s -p 'sink-boundaries{growth=0.01}' | filecheck %s --check-prefix=LARGE

// A teacher's logits are 20 times its hidden states, so its head goes to the student, unless the head is too large for it. Of log-probabilities and probabilities one is sent.

sec.graph "distil" widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.pattern when [] share "1" {B = 1, S = 100}
  sec.block "teacher.body" class "T" params 5000 trainable 0 component "teacher" layers 4 when []
  sec.block "teacher.head" class "H" params 1280 trainable 0 component "teacher" layers 4 when []
  sec.block "student" class "S" params 9000 trainable 9000 component "student" layers 2 when []
  // CHECK: sec.section "teacher" mode "forward" when [] blocks ["teacher.body"]
  // CHECK-NEXT: sec.section "student" mode "train" when [] blocks ["student", "teacher.head"]
  // CHECK-SAME: notes = ["teacher.head moved into student: 128 kB -> 3.2 kB per sample from teacher to student, with 256 kFLOP a sample and 5.12 kB of weights"]
  // LARGE: sec.section "teacher" mode "forward" when [] blocks ["teacher.body", "teacher.head"]
  sec.section "teacher" mode "forward" when [] blocks ["teacher.body", "teacher.head"]
  sec.section "student" mode "train" when [] blocks ["student"]
  sec.case "text" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %h = sec.call "teacher.body" (%ids) args "$0" outs [""] no_grad in @teacher {mode = "forward", flops = "10000*B*S"} : !sec.tensor<[B, S, 8], f32>
    // CHECK: sec.call "teacher.head" {{.*}} in @student
    %t = sec.call "teacher.head" (%h) args "$0" outs [""] no_grad in @teacher {mode = "forward", flops = "2560*B*S"} : !sec.tensor<[B, S, 160], f32>
    %s = sec.call "student" (%ids) args "$0" outs [""] in @student {mode = "train", flops = "20000*B*S"} : !sec.tensor<[B, S, 160], f32, grad>
    %p = sec.glue "aten._log_softmax.default" (%t) args "$0, -1, False" in @teacher : !sec.tensor<[B, S, 160], f32>
    %e = sec.glue "aten.exp.default" (%p) args "$0" in @teacher : !sec.tensor<[B, S, 160], f32>
    %d = sec.glue "aten.sub.Tensor" (%p, %s) args "$0, $1" in @student : !sec.tensor<[B, S, 160], f32, grad>
    %k = sec.glue "aten.mul.Tensor" (%d, %e) args "$0, $1" in @student : !sec.tensor<[B, S, 160], f32, grad>
    %n = sec.glue "aten.sum.default" (%k) args "$0" in @student : !sec.tensor<[], f32, grad>
    sec.term "kl" (%n) in @student
    sec.return constant "0.0"
  }
}
