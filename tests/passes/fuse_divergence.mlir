// RUN: secc opt %s -p fuse-linear-loss --split-input-file | filecheck %s
// RUN: secc opt %s -p 'fuse-linear-loss{without="linear-kl-ce"}' --split-input-file | filecheck %s --check-prefix APART
// RUN: secc opt %s -p 'fuse-linear-loss,coarsen' --split-input-file | filecheck %s --check-prefix SECTIONS

// Cross entropy and a divergence at temperature 2 of one student come from one operator, both heads' logits are gone, and the teacher's
// section sends hidden states. Each of the two operators takes its part where the rule for both is off.

// CHECK: fusions = ["linear-kl-ce; student.head and teacher.head (forward); model.py:7; "]
// APART: fusions = ["linear-cross-entropy; student.head; model.py:7; ", "linear-kl; student.head and teacher.head (forward); model.py:9; "]
sec.graph "distil" {
  sec.symbol "N" kind "rows" key "x" dim 0
  sec.block "student.body" class "S" params 9000 trainable 9000 component "student" layers 2 when []
  sec.block "student.head" class "Linear" params 320 trainable 320 component "student" layers 2 when [] {weight = !sec.tensor<[40, 8], f32, grad>}
  sec.block "teacher.body" class "T" params 9000 trainable 0 component "teacher" layers 4 when []
  sec.block "teacher.head" class "Linear" params 640 trainable 0 component "teacher" layers 4 when [] {weight = !sec.tensor<[40, 16], f32>}
  // SECTIONS: sec.section "teacher" mode "forward" when [] blocks ["teacher.body"]
  // SECTIONS: sec.section "student" mode "train" when [] blocks ["student.body"]
  sec.case "c0" when [] {
    %x = sec.input "x" : !sec.tensor<[N, 8], f32>
    %labels = sec.input "labels" : !sec.tensor<[N], i64>
    %h = sec.call "student.body" (%x) args "$0" outs [""] {mode = "train", flops = "1000*N"} : !sec.tensor<[N, 8], f32, grad>
    %y = sec.call "student.head" (%h) args "$0" outs [""] {mode = "train", flops = "1000*N"} : !sec.tensor<[N, 40], f32, grad>
    // SECTIONS: %[[g:.*]] = sec.call "teacher.body" {{.*}} in @teacher
    %g = sec.call "teacher.body" (%x) args "$0" outs [""] no_grad {mode = "forward", flops = "1000*N"} : !sec.tensor<[N, 16], f32>
    %t = sec.call "teacher.head" (%g) args "$0" outs [""] no_grad {mode = "forward", flops = "1000*N"} : !sec.tensor<[N, 40], f32>
    %c = sec.glue "aten._log_softmax.default" (%y) args "$0, -1, False" : !sec.tensor<[N, 40], f32, grad>
    %n, %w = sec.glue "aten.nll_loss_forward.default" (%c, %labels) args "$0, $1, None, 2, -100" : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32>
    %y2 = sec.glue "aten.div.Tensor" (%y) args "$0, 2.0" : !sec.tensor<[N, 40], f32, grad>
    %t2 = sec.glue "aten.div.Tensor" (%t) args "$0, 2.0" : !sec.tensor<[N, 40], f32>
    %q = sec.glue "aten._log_softmax.default" (%y2) args "$0, -1, False" : !sec.tensor<[N, 40], f32, grad>
    %p = sec.glue "aten._softmax.default" (%t2) args "$0, -1, False" : !sec.tensor<[N, 40], f32>
    %m = sec.glue "aten.mul.Tensor" (%p, %q) args "$0, $1" : !sec.tensor<[N, 40], f32, grad>
    %l = sec.glue "aten.xlogy.Tensor" (%p) args "$0, $0" : !sec.tensor<[N, 40], f32>
    %d = sec.glue "aten.sub.Tensor" (%l, %m) args "$0, $1" : !sec.tensor<[N, 40], f32, grad>
    %k = sec.glue "aten.sum.default" (%d) args "$0" : !sec.tensor<[], f32, grad>
    // CHECK-NOT: softmax
    // CHECK: "secc.linear_kl_ce" (%h, %{{.*}}, %g, %{{.*}}, %labels) args "$0, $1, $2, $3, $4, temperature=2.0" at "model.py:7"
    // CHECK: sec.term "ce" (%cross_entropy)
    // CHECK: sec.term "kl" (%divergence)
    // APART: "secc.linear_cross_entropy" (%h, %{{.*}}, %labels) args "$0, $1, $2" at "model.py:7"
    // APART: "secc.linear_kl" (%h, %{{.*}}, %g, %{{.*}}) args "$0, $1, $2, $3, temperature=2.0" at "model.py:9"
    // SECTIONS: "secc.linear_kl_ce" {{.*}} in @student
    sec.term "ce" (%n) at "model.py:7"
    sec.term "kl" (%k) at "model.py:9"
    sec.return constant "0.0"
  }
}

// -----

// A head with a bias gives it to the operator, and rows may be weighted.

// CHECK: sec.graph "biased" attributes {fusions = ["linear-kl; student and teacher (forward); model.py:9; "]}
sec.graph "biased" {
  sec.symbol "N" kind "rows" key "x" dim 0
  sec.block "student" class "Linear" params 320 trainable 320 {weight = !sec.tensor<[40, 8], f32, grad>, bias = !sec.tensor<[40], f32, grad>}
  sec.block "teacher" class "Linear" params 320 trainable 0 {weight = !sec.tensor<[40, 8], f32>}
  sec.case "c0" when [] {
    %x = sec.input "x" : !sec.tensor<[N, 8], f32>
    %w = sec.input "w" : !sec.tensor<[N, 1], f32>
    %y = sec.call "student" (%x) args "$0" outs [""] : !sec.tensor<[N, 40], f32, grad>
    %t = sec.call "teacher" (%x) args "$0" outs [""] : !sec.tensor<[N, 40], f32>
    %q = sec.glue "aten._log_softmax.default" (%y) args "$0, -1, False" : !sec.tensor<[N, 40], f32, grad>
    %p = sec.glue "aten._log_softmax.default" (%t) args "$0, -1, False" : !sec.tensor<[N, 40], f32>
    %e = sec.glue "aten.exp.default" (%p) args "$0" : !sec.tensor<[N, 40], f32>
    %d = sec.glue "aten.sub.Tensor" (%p, %q) args "$0, $1" : !sec.tensor<[N, 40], f32, grad>
    %m = sec.glue "aten.mul.Tensor" (%e, %d) args "$0, $1" : !sec.tensor<[N, 40], f32, grad>
    %v = sec.glue "aten.mul.Tensor" (%m, %w) args "$0, $1" : !sec.tensor<[N, 40], f32, grad>
    %k = sec.glue "aten.sum.default" (%v) args "$0" : !sec.tensor<[], f32, grad>
    // CHECK: %[[rows:.*]] = sec.glue "aten.reshape.default" (%w)
    // CHECK: "secc.linear_kl" (%x, %{{.*}}, %x, %{{.*}}, %[[rows]], %{{.*}}) args "$0, $1, $2, $3, mask=$4, student_bias=$5"
    sec.term "kl" (%k) at "model.py:9"
    sec.return constant "0.0"
  }
}
